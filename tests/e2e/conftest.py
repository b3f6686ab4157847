from __future__ import annotations

from pathlib import Path

import pytest
from tiny_base import make_base


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a context that takes seconds to fill."""
    return make_base(tmp_path_factory.mktemp("base"), context=8192)
