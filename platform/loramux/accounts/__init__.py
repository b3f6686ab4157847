"""Callers: tenants, members, keys and sign-in, and the webhooks that notify them."""
