"""A migrated database to copy for every seed, in memory if there is room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.database import Template, make_template
from simulation.run import memory_folder


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        yield make_template(Path(folder))


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir=memory_folder()))
    yield place
    shutil.rmtree(place)
