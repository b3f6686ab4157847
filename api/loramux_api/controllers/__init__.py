"""Thin handlers, one module a subject; siblings do not import each other."""
