from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from fake_registry import Shelf

from loramux.common.identity import Principal
from loramux.data.records.database import Database

Enrol = Callable[[str], Awaitable[Principal]]


@pytest.fixture
def shelf(database: Database) -> Shelf:
    return Shelf(database, max_aliases=3, max_grants=2, pins_per_tenant=2)


@pytest.fixture
async def acme(enrol: Enrol) -> Principal:
    return await enrol("acme")


@pytest.fixture
async def globex(enrol: Enrol) -> Principal:
    return await enrol("globex")
