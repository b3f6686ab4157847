"""Names of adapters and their meaning: resolve, release, share, pin, delete."""
