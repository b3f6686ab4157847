"""One continuously batched loop that serves many adapters and the base model."""
