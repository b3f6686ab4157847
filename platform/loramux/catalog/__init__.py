"""Adapters before they are served: names and revisions, uploads, validation."""
