"""Limits of tenants, projects, keys and members: rates, concurrency, adapters and money."""
