"""Training adapters: weights that a trainer pushes while it trains."""
