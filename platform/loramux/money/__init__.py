"""Costs of usage: prices, limits and budgets, the ledger, invoices, exports."""
