"""The PEFT peer is a fair one: batching and padding leave every answer what PEFT gives it alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import models
import msgspec
import pytest
import specs
import torch
from peers.peft_static import PeftStatic
from peers.peft_worker import Peft, run
from peers.serving import SystemFailed
from specs import ADAPTERS, MODELS, Setup
from workloads import Item, comparison

MICRO = MODELS["micro"]


@pytest.fixture(scope="module", autouse=True)
def _work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The smallest model in a separate folder, used by this process and by those that it starts."""
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs, "WORK", work)
        patch.setenv("LORAMUX_BENCH_WORK", str(work))
        models.ensure(MICRO)
        yield


def short(name: str, count: int = 10) -> list[Item]:
    """The first requests of a workload, with lengths from 3 to 12."""
    return [msgspec.structs.replace(item, max_tokens=3 + i) for i, item in enumerate(comparison(name)[:count])]


@pytest.mark.parametrize("name", ["w24-mix", "w24-one", "w24-base"])
def test_batched_answers_are_those_of_requests_alone(name: str) -> None:
    items = short(name)
    adapters = sorted({item.adapter for item in items if item.adapter})
    peft = Peft.load(MICRO, torch.float32, adapters)
    batched, _ = run(peft, items, batch_size=4)
    alone, _ = run(peft, items, batch_size=1)
    assert [o.token_ids for o in batched] == [o.token_ids for o in alone]
    assert [o.output_tokens for o in batched] == [item.max_tokens for item in items]
    assert len({tuple(o.token_ids) for o in batched}) == len(items)


def test_adapters_are_applied_to_their_own_rows() -> None:
    items = [Item(id=a or "base", prompt_token_ids=[9] * 20, max_tokens=8, adapter=a) for a in (None, *ADAPTERS[:3])]
    mixed, _ = run(Peft.load(MICRO, torch.float32, ADAPTERS[:3]), items, batch_size=4)
    for item, outcome in zip(items, mixed, strict=True):
        own = [item.adapter] if item.adapter else []
        alone, _ = run(Peft.load(MICRO, torch.float32, own), [item], batch_size=1)
        assert outcome.token_ids == alone[0].token_ids
    assert len({tuple(outcome.token_ids) for outcome in mixed}) == 4


def test_times_are_those_of_the_batch_and_of_the_requests_own_last_token() -> None:
    items = short("w24-base", 6)
    outcomes, wall_s = run(Peft.load(MICRO, torch.float32, []), items, batch_size=3)
    first, second = outcomes[:3], outcomes[3:]
    for batch in (first, second):
        assert len({o.ttft_s for o in batch}) == 1
        assert [o.total_s for o in batch] == sorted(o.total_s for o in batch)
    assert (second[0].ttft_s or 0) > first[-1].total_s
    assert wall_s > second[-1].total_s


def test_peer_runs_in_a_separate_process_and_reports_it(tmp_path: Path) -> None:
    setup = Setup(MICRO, "float32", threads=1, max_num_seqs=4, scratch=tmp_path)
    items = short("w24-mix", 5)
    started = time.perf_counter()
    (drive,) = PeftStatic().drives(setup, [("static", items)])
    assert [o.id for o in drive.outcomes] == [item.id for item in items]
    assert drive.resources.peak_pss_bytes > 100 << 20
    assert 0 < drive.start_s < time.perf_counter() - started
    assert drive.counters is None


def test_a_peer_that_cannot_run_is_a_failed_system(tmp_path: Path) -> None:
    setup = Setup(MICRO, "float99", threads=1, scratch=tmp_path)
    with pytest.raises(SystemFailed, match="ended with 1"):
        list(PeftStatic().drives(setup, [("static", short("w24-base", 1))]))
