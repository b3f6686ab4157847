"""Thin handlers, one module per subject. Modules of this package do not import each other."""
