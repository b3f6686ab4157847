"""Tenants' webhooks: their endpoints, the events, and the delivery of the one to the other."""
