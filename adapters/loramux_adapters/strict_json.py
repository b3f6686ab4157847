"""JSON as a format and not as Python's habits: strict UTF-8, no duplicate keys, no NaN, no endless nesting."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse(data: bytes) -> Any:
    """The value in `data`; raises ValueError with the reason. The caller bounds the size."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer
        )
        if b"\\u" in data:
            # An escaped half of a surrogate pair passes Python's parser and no other.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


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
