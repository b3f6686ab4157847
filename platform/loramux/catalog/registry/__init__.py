"""Names of adapters and their meaning: resolve, release, grant, pin, delete."""
