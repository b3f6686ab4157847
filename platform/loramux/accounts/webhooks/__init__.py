"""Tenants' webhooks: the endpoints, the events, and the delivery of events to endpoints."""
