"""What exports refuse."""

from __future__ import annotations


class ExportError(Exception):
    """A sentence with the way out."""
