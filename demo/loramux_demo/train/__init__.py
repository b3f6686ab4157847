"""Training of the demo's base model and adapters. It takes minutes; the demo itself only reads the result."""
