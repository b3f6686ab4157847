"""What the house refuses, as a click error: one clear sentence on stderr and exit code 1."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def refused() -> Iterator[None]:
    """Turn the house's own errors into click's; everything else is a bug and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if type(error) in _ours():
            raise click.ClickException(str(error)) from None
        raise


def _ours() -> set[type[Exception]]:
    """The error classes of modules that have been loaded; one that was not cannot have raised anything."""
    bases = {
        "loramux.settings": "SettingsError",
        "loramux.records": "RecordsError",
        "loramux.tenants": "TenantsError",
        "loramux.engine": "EngineDied",
    }
    roots: list[type[Exception]] = [
        getattr(sys.modules[m], name) for m, names in bases.items() if m in sys.modules for name in names
    ]
    return {kind for root in roots for kind in (root, *_descendants(root))}


def _descendants(root: type[Exception]) -> set[type[Exception]]:
    return {kind for child in root.__subclasses__() for kind in (child, *_descendants(child))}
