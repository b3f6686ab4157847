"""Ranges of dependencies end before the next release that may break them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("project", ["pyproject.toml", "client/pyproject.toml"])
def test_every_dependency_of_an_installation_has_an_upper_bound(project: str) -> None:
    described = tomllib.loads((ROOT / project).read_text())["project"]
    extras = described.get("optional-dependencies", {})
    wanted = [*described["dependencies"], *(one for extra, own in extras.items() if extra != "dev" for one in own)]
    own = ("loramux", "loramux-client")
    ranges = {one: Requirement(one) for one in wanted}
    open_ended = [
        text
        for text, one in ranges.items()
        if one.name not in own and not any(bound.operator in ("<", "<=", "==", "~=") for bound in one.specifier)
    ]
    assert open_ended == []
