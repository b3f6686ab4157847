"""The platform: engine, records, registry, tenants, usage and the gateway between them."""
