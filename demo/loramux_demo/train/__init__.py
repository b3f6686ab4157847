"""Training of the demo's base model and adapters. The training takes minutes; the demo itself only reads the result."""
