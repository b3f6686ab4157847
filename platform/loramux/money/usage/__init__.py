"""Usage: requests, which are opened and settled in the ledger, and sums over the ledger."""
