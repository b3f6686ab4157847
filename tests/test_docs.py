"""The documentation: the site builds without a warning, and every command in it exists with the options it is given."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from loramux_adapters.families import ENCODERS, FAMILIES
from loramux_api.cli.main import main
from loramux_demo.assets import OWNERS, load_prompts
from loramux_demo.tour import MODELS
from reference import SITE_PAGES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "client/README.md"])
COMMAND = re.compile(r"(?:\$ |[A-Z_]+=\S+ |.* exec loramux )*loramux ((?:[a-z-]+ ?)+.*)")

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FACTS: dict[str, object] = {
    r"(\d+) families of text": sum(not family.text_type for family in FAMILIES.values()),
    r"(\d+) of encoders": sum(not encoder.loads_text_alone for encoder in ENCODERS.values()),
    r"sends\s+(\d+)\s+requests": len(load_prompts()),
    r"\b(\d+) of \d+ answers(?: are)? exact": len(load_prompts()),
    r"\b\d+ of (\d+) answers(?: are)? exact": len(load_prompts()),
    r"(\w+) adapters of \w+ customers": WORDS[MODELS - 1],
    r"\w+ adapters of (\w+) customers": WORDS[len(OWNERS)],
    r"(\d+) distinct adapters and the base": MODELS - 1,
    r"one step served (\w+) adapters": WORDS[MODELS - 1],
    r"[Pp]ython (\d\.\d+) or newer": PROJECT["requires-python"].removeprefix(">="),
}
"""Facts of the code, by the sentences in which pages say them."""


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    for page, write in SITE_PAGES.items():
        (tmp_path / "docs" / page).write_text(write())
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [zensical, "build", "--clean", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "build/site/index.html").read_text()
    assert "Quick start" in index
    assert "POST /v1/chat/completions" in (tmp_path / "build/site/http/index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_table_has_a_head_and_one_row_a_line(page: Path) -> None:
    """Rows after an empty line are a paragraph: they are shown as bars and text, and mdformat joins their lines."""
    blocks = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text()).split("\n\n")
    tables = [block.strip("\n").splitlines() for block in blocks if block.strip("\n").startswith("|")]
    broken = [lines[0] for lines in tables if not re.match(r"\|[ :|-]+\|$", lines[1] if lines[1:] else "")]
    broken += [line for lines in tables for line in lines if not (line.startswith("|") and line.endswith("|"))]
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r'"([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} | set(SITE_PAGES)
    assert listed == {page for page in pages if not page.startswith("decisions/")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path) -> None:
    for line, words in _commands(page.read_text()):
        _check(line, words)


def test_a_command_that_does_not_exist_is_found() -> None:
    for wrong in ("loramux key list", "loramux tenant create acme --shape round", "loramux adapter shove ./x"):
        with pytest.raises(AssertionError):
            [_check(line, words) for line, words in _commands(f"    {wrong}\n")]


@pytest.mark.parametrize("sentence", FACTS)
def test_numbers_of_the_pages_are_those_of_the_code(sentence: str) -> None:
    pages = {str(page.relative_to(ROOT)): page.read_text() for page in [*PAGES, ROOT / "CHANGELOG.md"]}
    told = {name: set(found) for name, text in pages.items() if (found := re.findall(sentence, text))}
    assert told, "no page says it any more"
    assert {name: numbers for name, numbers in told.items() if numbers != {str(FACTS[sentence])}} == {}


def test_tests_that_a_page_names_exist() -> None:
    text = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    tests = set(re.findall(r"def (test_\w+)", text))
    for page in PAGES:
        ours = re.sub(r"(?ms)^## vLLM's own tests$.*?(?=^## |\Z)", "", page.read_text())
        named = set(re.findall(r"`(test_\w+)`", ours))
        assert named <= tests, f"{page.name} names {sorted(named - tests)}"


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of code blocks and of code in sentences."""
    blocks = [line for line in text.splitlines() if line.startswith("    ") or line.startswith("$ ")]
    blocks += re.findall(r"`(loramux [^`]+)`", text)
    fenced = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
    for line in [*blocks, *"\n".join(fenced).splitlines()]:
        for part in re.split(r"&&|\||;", line.split(" #")[0]):
            if match := COMMAND.match(part.strip()):
                try:
                    words = shlex.split(match[1])
                except ValueError:  # a quotation that goes on in the next line
                    words = match[1].split()
                yield line, words


def _check(line: str, words: list[str]) -> None:
    """Follow the words through the groups; every option must be the command's own."""
    command: click.Command = main
    context = click.Context(main, info_name="loramux")
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        name, *words = words
        if name in ("...", "COMMAND"):
            return
        child = command.get_command(context, name)
        assert child is not None, f"{line.strip()!r}: `{context.command_path}` has no command {name!r}"
        command, context = child, click.Context(child, info_name=name, parent=context)
    options = {
        option for parameter in command.get_params(context) for option in parameter.opts + parameter.secondary_opts
    }
    for word in words:
        if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word):
            assert word.split("=")[0] in options, f"{line.strip()!r}: `{context.command_path}` has no option {word!r}"


def test_failures_of_a_fleet_name_tests_that_exist() -> None:
    """Each row of the table names the test that shows it, or says that there is none."""
    page = (ROOT / "docs/fleet.md").read_text()
    rows = page.split("| seen in |\n")[1].partition("\n")[2].split("\n\n")[0].splitlines()
    seen = [row.split("|")[-2].strip() for row in rows]
    assert len(seen) > 15
    for where in seen:
        path = where.strip("`")
        places = (ROOT / "tests" / f"{path}.py", ROOT / "tests/platform" / f"{path}.py")
        assert where == "not tested" or any(place.is_file() for place in places), where
