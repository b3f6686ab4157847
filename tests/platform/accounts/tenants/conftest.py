from __future__ import annotations

import pytest
from manual_clock import ManualClock

from loramux.common.units import SECOND


@pytest.fixture
def clock() -> ManualClock[int]:
    return ManualClock(1_700_000_000 * SECOND)
