"""One zoo for each family and session."""

from __future__ import annotations

import pytest
from adapter_zoo import Zoo


@pytest.fixture(scope="session")
def zoo_of(tmp_path_factory: pytest.TempPathFactory):
    """zoo_of("llama"): made once a session."""
    made: dict[str, Zoo] = {}

    def get(family: str) -> Zoo:
        if family not in made:
            made[family] = Zoo(family, tmp_path_factory.mktemp(family))
            made[family].make_adapters()
        return made[family]

    return get
