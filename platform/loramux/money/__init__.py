"""What usage costs: prices, limits and budgets, the ledger, invoices, exports."""
