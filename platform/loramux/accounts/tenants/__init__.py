"""Customers, their projects, members and keys: the one place where a secret becomes a verified tenant."""
