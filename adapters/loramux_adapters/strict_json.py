"""Strict JSON: UTF-8 only, no duplicate keys, no NaN, no deep nesting, no half surrogate pairs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MAX_DEPTH = 32
"""Maximum number of levels of nested containers. Python's parser accepts hundreds of levels, with which recursive code
that reads the value would fail.
"""


def parse(data: bytes) -> Any:
    """Parse `data`; raises ValueError with the reason. The caller bounds the size."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer
        )
        if b"\\u" in data:
            # Python's parser accepts an escaped half of a surrogate pair; other parsers do not.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        found = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [child for children in found for child in children]
        if not level:
            return
    raise ValueError(f"nested too deeply: {MAX_DEPTH} levels are the maximum")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {duplicate[:120]!r} stands twice")
    return result


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer to other readers")
    return int(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
