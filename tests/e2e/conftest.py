from __future__ import annotations

from pathlib import Path

import pytest
from real_model import PackagesUnreachable, smollm2
from tiny_base import make_base


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a context that takes seconds to fill."""
    return make_base(tmp_path_factory.mktemp("base"), context=8192)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2 135M Instruct in float32; a test that asks for it is slow."""
    try:
        return smollm2("float32")
    except PackagesUnreachable as error:
        pytest.skip(str(error))
