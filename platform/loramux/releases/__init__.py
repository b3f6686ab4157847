"""Measured releases: how each revision of an adapter serves, and which of two revisions is better."""
