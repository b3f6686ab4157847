"""The step's cost is measured on steps that decode, with the pool or the rows being what is short."""

import pytest
from step_cost import Bench, measure


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_every_row_decodes_and_others_wait(tight: bool, prefix_cache: bool) -> None:
    cost = measure(Bench(8, tight=tight, prefix_cache=prefix_cache), 5)
    assert cost.plan > 0 < cost.commit
    assert cost.rows == 8 or (tight and 0 < cost.rows < 16)


def test_requests_wait_throughout() -> None:
    bench = Bench(8, tight=False, prefix_cache=False)
    for _ in range(60):
        bench.step()
    assert len(bench.scheduler.running) == 8
    assert len(bench.scheduler.queue) == 8
