"""Matching with a customer's regular expressions in bounded time.

Python's `re` backtracks, holds the interpreter's lock and cannot be interrupted: `(.+)+x` would stop every thread, and
even compiling can take minutes. Plain expressions (names: nearly everything that PEFT writes) are safe and are matched
here. Any other is matched by a child process with limits on processor time and memory.
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
CPU_SECONDS_PER_NAME = 1e-4
"""The child's limit is the larger of both. A mixture's experts may be eighteen thousand names."""
MEMORY_BYTES = 256 << 20
WALL_SECONDS = 60
"""A safety net for a child that a starved machine never runs; processor time is the real limit."""

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_DEMANDING = re.compile(r"[*+?{|(\[]")


def match_guarded(rules: TargetRules, names: Sequence[str]) -> list[Match]:
    """Return what match_modules returns. Raises ConfigRejected: `pattern_invalid` or `pattern_too_slow`."""
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
    """True if compiling or matching may cost more than reading: it repeats, alternates, groups or has classes."""
    return _DEMANDING.search(_ESCAPED.sub("", expression)) is not None


def _match_in_child(rules: TargetRules, names: Sequence[str], field: str, expression: str) -> list[Match]:
    cpu_seconds = max(CPU_SECONDS, CPU_SECONDS_PER_NAME * len(names))
    answer = _ask_child({"rules": rules, "names": names}, cpu_seconds)
    if answer is None:
        raise ConfigRejected(
            "pattern_too_slow",
            field,
            f"The regular expressions of adapter_config.json need more than {cpu_seconds:g} s for this base's "
            f"{len(names)} module names; {field} holds {expression[:120]!r}. Write target_modules as a list of names, "
            "and the keys of rank_pattern and alpha_pattern as plain names.",
        )
    if "invalid" in answer:
        raise InvalidExpression(*answer["invalid"])
    return [Match(*match) for match in answer["matches"]]


def _ask_child(question: dict[str, Any], cpu_seconds: float) -> dict[str, Any] | None:
    # -I and -S: the standard library alone, without the environment.
    command = [sys.executable, "-I", "-S", str(Path(matching.__file__)), str(cpu_seconds), str(MEMORY_BYTES)]
    try:
        child = subprocess.run(  # noqa: S603 - our own file, and what the customer wrote goes through stdin
            command, input=json.dumps(question), capture_output=True, text=True, timeout=WALL_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer
