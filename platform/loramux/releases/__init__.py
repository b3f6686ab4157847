"""Releases that are measured: how each revision of an adapter serves, and which of two is better on a set."""
