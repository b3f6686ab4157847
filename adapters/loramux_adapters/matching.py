"""PEFT's rules: the modules that a LoRA configuration targets, and the rank and alpha of each.

Source: `check_target_module_exists` (peft/tuners/tuners_utils.py) and `get_pattern_key` (peft/utils/other.py) of PEFT
0.21.2; a test compares every rule with them. Standard library only: a child process runs this same file if an adapter
has regular expressions that could take for ever (targets.py).
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

NameTest = Callable[[str], bool]


class TargetRules(NamedTuple):
    """The part of a configuration that selects modules. A string is a regular expression for whole names."""

    target_modules: str | Sequence[str]
    exclude_modules: str | Sequence[str] | None
    layers_to_transform: Sequence[int] | None
    layers_pattern: Sequence[str] | None
    rank_keys: Sequence[str]
    alpha_keys: Sequence[str]
    target_field: str = "target_modules"
    """The field that `target_modules` was read from."""


class Match(NamedTuple):
    """One targeted module, and the keys of rank_pattern and alpha_pattern that apply (its own name: none)."""

    module: str
    rank_key: str
    alpha_key: str


class InvalidExpression(ValueError):
    """`written`, in `field`, does not compile as PEFT would compile it."""

    def __init__(self, field: str, written: str, reason: str) -> None:
        super().__init__(field, written, reason)
        self.field = field
        self.written = written
        self.reason = reason


def match_modules(rules: TargetRules, names: Iterable[str]) -> list[Match]:
    """Return the targeted `names`, in their order. Raises InvalidExpression."""
    rank_key = _pattern_key("rank_pattern", rules.rank_keys)
    alpha_key = _pattern_key("alpha_pattern", rules.alpha_keys)
    return [Match(name, rank_key(name), alpha_key(name)) for name in _targeted(rules, names)]


def expressions(rules: TargetRules) -> Iterator[tuple[str, str]]:
    """Yield every regular expression of `rules` as written, after its field."""
    for field, value in ((rules.target_field, rules.target_modules), ("exclude_modules", rules.exclude_modules)):
        if isinstance(value, str):
            yield field, value
    yield from (("layers_pattern", pattern) for pattern in rules.layers_pattern or ())
    yield from (("rank_pattern", key) for key in rules.rank_keys)
    yield from (("alpha_pattern", key) for key in rules.alpha_keys)


def _targeted(rules: TargetRules, names: Iterable[str]) -> Iterator[str]:
    is_excluded = _matches("exclude_modules", rules.exclude_modules or ())
    is_target = _matches(rules.target_field, rules.target_modules)
    stands_in_layers = _stands_in_layers(rules)
    # layers_to_transform narrows only suffixes: a whole name in a list always matches.
    whole = frozenset(() if isinstance(rules.target_modules, str) else rules.target_modules)
    for name in names:
        if is_target(name) and not is_excluded(name) and (name in whole or stands_in_layers(name)):
            yield name


def _matches(field: str, value: str | Sequence[str]) -> NameTest:
    if isinstance(value, str):
        expression = _compile(field, value, value)
        return lambda name: expression.fullmatch(name) is not None
    listed = frozenset(value)
    return lambda name: name in listed or any(name[dot.end() :] in listed for dot in re.finditer(r"\.", name))


def _stands_in_layers(rules: TargetRules) -> NameTest:
    layers = frozenset(rules.layers_to_transform or ())
    if not layers:
        return lambda _: True
    compiled = [
        _compile("layers_pattern", pattern, rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
        for pattern in rules.layers_pattern or ()
    ] or [re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")]

    def test(name: str) -> bool:
        match = next(filter(None, (expression.match(name) for expression in compiled)), None)
        # A pattern with a bare alternative can match without an index.
        return match is not None and match["idx"] is not None and int(match["idx"]) in layers

    return test


def _pattern_key(field: str, keys: Sequence[str]) -> Callable[[str], str]:
    compiled = [(key, _compile(field, key, rf"(.*\.)?({key})$")) for key in keys]
    return lambda name: next((key for key, expression in compiled if expression.match(name)), name)


def _compile(field: str, written: str, used: str) -> re.Pattern[str]:
    try:
        return re.compile(used)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidExpression(field, written, str(error)) from None


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Match one request from standard input within the limits. If a limit is exceeded, the kernel ends this process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # RLIMIT_CPU knows whole seconds only
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    question = json.load(sys.stdin)
    try:
        answer: dict[str, Sequence[object]] = {
            "matches": match_modules(TargetRules(*question["rules"]), question["names"])
        }
    except InvalidExpression as error:
        answer = {"invalid": error.args}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
