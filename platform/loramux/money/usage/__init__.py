"""Usage: requests opened and settled in the ledger, and sums over it."""
