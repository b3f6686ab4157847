"""The one grammar of names that people choose: tenants, adapters and aliases."""

from __future__ import annotations

import re

GRAMMAR = "[a-z0-9][a-z0-9._-]{0,62}"
GRAMMAR_IN_WORDS = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"

_name = re.compile(GRAMMAR)


def is_name(text: str) -> bool:
    """Whether `text` is a well-formed name."""
    return _name.fullmatch(text) is not None
