from __future__ import annotations

import pytest
from tiny_tokenizers import FAMILIES
from tokenizers import Tokenizer


@pytest.fixture(params=list(FAMILIES), scope="session")
def family(request: pytest.FixtureRequest) -> Tokenizer:
    return FAMILIES[request.param]()
