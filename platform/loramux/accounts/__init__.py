"""Who calls: tenants, members, keys and sign-in, and the webhooks that tell them."""
