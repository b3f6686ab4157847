"""Matching with a customer's regular expressions, bounded: no expression can hold the server.

Python's `re` backtracks, holds the interpreter's lock and cannot be interrupted, so `(.+)+x` would stop every thread;
even compiling can take minutes. Plain expressions (names, which is nearly all that PEFT writes) can do neither and are
matched here; any other is matched by a child process with limits on its processor time and memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loramux_adapters import matching
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import InvalidExpression, Match, TargetRules, expressions, match_modules

CPU_SECONDS = 0.5
MEMORY_BYTES = 256 << 20
WALL_SECONDS = 60
"""Processor time is what bounds the child; this only ends one that a starved machine never runs."""

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_DEMANDING = re.compile(r"[*+?{|(\[]")


def match_bounded(rules: TargetRules, names: Sequence[str]) -> list[Match]:
    """As match_modules. Raises ConfigRejected: `pattern_invalid` or `pattern_too_slow`."""
    demanding = next((pair for pair in expressions(rules) if is_demanding(pair[1])), None)
    try:
        if demanding is None:
            return match_modules(rules, names)
        return _match_in_child(rules, names, *demanding)
    except InvalidExpression as error:
        raise ConfigRejected(
            "pattern_invalid",
            error.field,
            f"{error.field} holds {error.written[:120]!r}, which is no regular expression: {error.reason}.",
        ) from None


def is_demanding(expression: str) -> bool:
    """Whether matching or compiling could cost more than reading it: it repeats, chooses, groups or has classes."""
    return _DEMANDING.search(_ESCAPED.sub("", expression)) is not None


def _match_in_child(rules: TargetRules, names: Sequence[str], field: str, expression: str) -> list[Match]:
    answer = _ask_child({"rules": rules, "names": names})
    if answer is None:
        raise ConfigRejected(
            "pattern_too_slow",
            field,
            f"The regular expressions of adapter_config.json need more than {CPU_SECONDS} s for this base's "
            f"{len(names)} module names; {field} holds {expression[:120]!r}. Write target_modules as a list of names, "
            "and the keys of rank_pattern and alpha_pattern as plain names.",
        )
    if "invalid" in answer:
        raise InvalidExpression(*answer["invalid"])
    return [Match(*match) for match in answer["matches"]]


def _ask_child(question: dict[str, Any]) -> dict[str, Any] | None:
    # -I and -S: the standard library alone, and nothing of the environment.
    command = [sys.executable, "-I", "-S", str(Path(matching.__file__)), str(CPU_SECONDS), str(MEMORY_BYTES)]
    try:
        child = subprocess.run(  # noqa: S603 - our own file, and what the customer wrote goes through stdin
            command, input=json.dumps(question), capture_output=True, text=True, timeout=WALL_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer
