"""Money: plans and prices, periods and invoices, costs and margins, and the check that engines and ledger agree."""
