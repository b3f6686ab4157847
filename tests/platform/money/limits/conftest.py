from __future__ import annotations

import pytest

from loramux.accounts.tenants.tenants import Tenants
from loramux.money.limits.limits import Limits


@pytest.fixture
def limits(tenants: Tenants) -> Limits:
    return Limits(tenants.changes)
