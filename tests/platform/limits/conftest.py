from __future__ import annotations

import pytest

from loramux.limits import Limits
from loramux.tenants import Tenants


@pytest.fixture
def limits(tenants: Tenants) -> Limits:
    return Limits(tenants.changes)
