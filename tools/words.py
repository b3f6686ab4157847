"""Read the project's prose: report words that must be read twice, or draw sentences at random for a reader.

    python tools/words.py [PATH ...]            offences, one a line; exit code 1 if there are any
    python tools/words.py --count [PATH ...]    offences by rule
    python tools/words.py --sample 60 --seed 7  sentences with their places, for a reader who did not write them

Prose is every docstring, attribute docstring and comment of the code and the tests, and every paragraph of the
documentation outside code. `CONTRIBUTING.md` states the rules; `RULES` are those that a pattern can find.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("kernels", "adapters", "platform", "api", "client", "demo", "tools", "tests", "benchmarks", "deploy")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "client/README.md")
SKIPPED = ("docs/decisions", "docs/http.md", "docs/commands.md", "node_modules", "tools/words.py", ".venv", "build")
PROXY = r"(?! (a|an|one|the|its|your) ([\w-]+ )?(API|proxy|balancer|gateway|firewall|CDN|NAT|ingress|scenes))"

COUNTED = r"tokens|requests|bytes|calls|steps|settlements|[KMG]i?B"
PER = re.compile(rf"\b({COUNTED}) an? (second|minute|hour|day|tenant|request|layer)\b")


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern for words that are hard to read, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    instead: str
    docstrings_only: bool = False
    product_only: bool = False

    def applies_to(self, piece: Prose) -> bool:
        """Return whether the rule reads this prose: all of it, only docstrings, or only prose outside the tests."""
        return (piece.is_docstring or not self.docstrings_only) and not (
            self.product_only and piece.path.startswith("tests/")
        )


RULES = (
    Rule("first word", re.compile(r"^(Of|By|Those|As|What|Whether|Where)\b"), "a verb or the thing's noun", True),
    Rule("behind", re.compile(rf"\bbehind\b{PROXY}", re.I), "after"),
    Rule(", for", re.compile(r", for (?!example|instance|all|each|every|both)"), "because"),
    Rule("beside", re.compile(r"\bbesides?\b", re.I), "next to, in addition to, with"),
    Rule("stands", re.compile(r"\b(stands?|lies?|lay|stood) (in|on|at|there|before|after|between|together)\b"), "is"),
    Rule("meanwhile", re.compile(r"\b(in the )?meanwhile\b", re.I), "during this time, at the same time"),
    Rule("of its own", re.compile(r"\bof (its|their|his|our) own\b", re.I), "its own, a separate"),
    Rule(
        "somebody",
        re.compile(r"\b(somebody|nobody|whoever|heeds?|desk|purse|courier|workshop|debtor)s?\b", re.I),
        "a noun",
    ),
    Rule(
        "first word of the product", re.compile(r"^(How|Both|They|Their)\b"), "a verb or the thing's noun", True, True
    ),
    Rule("the most", re.compile(r"^The (most|least) \w"), "maximum number of, minimum number of", True, True),
    Rule("a for per", PER, "per", product_only=True),
)


@dataclass(frozen=True, slots=True)
class Prose:
    """A docstring, a comment or a paragraph, as one line."""

    path: str
    line: int
    text: str
    is_docstring: bool

    @property
    def place(self) -> str:
        """Place of the prose, as `path:line`."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Offence:
    """A match of a rule in the prose."""

    prose: Prose
    rule: Rule
    found: str

    def __str__(self) -> str:
        return (
            f"{self.prose.place}: {self.found!r} ({self.rule.name}; write {self.rule.instead}): {self.prose.text[:120]}"
        )


def prose_of(paths: Iterable[Path]) -> Iterator[Prose]:
    """Yield the prose of files, in their order."""
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        yield from _of_python(name, text) if path.suffix == ".py" else _of_markdown(name, text)


def files(chosen: Iterable[str] = ()) -> list[Path]:
    """Return the files with prose: those below the chosen paths, or all."""
    roots = [ROOT / name for name in (chosen or (*CODE, *PAGES))]
    found = [
        path for root in roots for path in ([root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md")])
    ]
    names = {path.resolve().relative_to(ROOT).as_posix(): path.resolve() for path in found}
    return [path for name, path in sorted(names.items()) if not any(part in name for part in SKIPPED)]


def offences(pieces: Iterable[Prose]) -> Iterator[Offence]:
    """Yield what the rules find, outside quotations of code."""
    for piece in pieces:
        plain = re.sub(r"`[^`]*`|\"[^\"]*\"|\[[^\]]*\]\([^)]*\)", "`", piece.text)
        for rule in RULES:
            if rule.applies_to(piece) and (found := rule.pattern.search(plain)):
                yield Offence(piece, rule, found.group(0))


def sentences(pieces: Iterable[Prose]) -> list[tuple[str, str]]:
    """Return (place, sentence) of every sentence of four words or more."""
    split = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"])")
    return [(p.place, one) for p in pieces for one in split.split(p.text) if len(one.split()) > 3]


def _of_python(name: str, text: str) -> Iterator[Prose]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for paragraph in re.split(r"\n\s*\n", node.value.value):
                if not re.match(r"\n?\s{4,}\S+ {2,}|\s*[│├└┌]", paragraph):
                    yield Prose(name, node.lineno, " ".join(paragraph.split()), paragraph in node.value.value[:200])
    comment, began = "", 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!|# (noqa|type:|ruff)", token.string):
            began = began or token.start[0]
            comment += " " + token.string.lstrip("# ")
        elif comment and token.type not in (tokenize.NL, tokenize.COMMENT):
            yield Prose(name, began, comment.strip(), False)
            comment, began = "", 0


def _of_markdown(name: str, text: str) -> Iterator[Prose]:
    number, fenced = 1, False
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.count("```") % 2:
            fenced = not fenced
        elif not fenced and not re.match(r"\n?( {4}|```|\||!\[|\[\w+\]: )", paragraph) and paragraph.strip():
            yield Prose(name, number, " ".join(paragraph.split()), False)
        number += paragraph.count("\n")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python tools/words.py", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pieces = list(prose_of(files(options.paths)))
    if options.sample:
        for place, sentence in random.Random(options.seed).sample(sentences(pieces), options.sample):  # noqa: S311
            print(f"{place}\n    {sentence}")
        return 0
    found = list(offences(pieces))
    if options.count:
        for rule, count in Counter(one.rule.name for one in found).most_common():
            print(f"{count:5d}  {rule}")
    else:
        print("\n".join(map(str, found)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
