"""Money: plans and prices, periods and invoices, costs and margins, and the proof that engines and ledger agree."""
