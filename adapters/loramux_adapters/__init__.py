"""PEFT files on disk become a validated adapter, and its weights become resident in pages of the pool."""
