"""CUDA graphs that cannot be made: needs a card, because the interpreter has no graphs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
import torch

from loramux.engine.execution.cuda_graphs import CudaGraphs, or_calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def doubling(rows: int, *, waits: bool = False) -> tuple[torch.Tensor, torch.Tensor, Callable[[], object]]:
    """Return a buffer, a result, and the function that fills it; with `waits` it waits for the device."""
    buffer, output = torch.zeros(2, rows, device="cuda")

    def run() -> None:
        output.copy_(buffer * 2)
        if waits:
            output.sum().item()

    return buffer, output, run


def test_recording_after_one_that_failed_is_a_graph_and_replays() -> None:
    """A capture that is cut by a wait leaves neither its stream nor its pool to the next one."""
    record, stream = or_calls(CudaGraphs(torch.device("cuda"))), torch.cuda.current_stream()
    made = [doubling(rows, waits=rows == 8) for rows in (16, 8, 4)]
    recordings = [record(run, buffer) for buffer, _, run in made]
    assert torch.cuda.current_stream() == stream
    assert [one.is_graph for one in recordings] == [True, False, True]
    for buffer, _, _ in made:
        buffer.fill_(3)
    for recording in recordings:
        recording.replay()
    assert all(output.eq(6).all() for _, output, _ in made)


def test_recording_while_another_thread_uses_the_card_is_a_graph() -> None:
    """Loads and steps of another engine of the process allocate, copy and wait."""
    ended: list[bool] = []

    def work() -> None:
        while not ended:
            torch.ones(1 << 20, device="cuda").sum().item()
            torch.empty(1 << 26, device="cuda")

    other = Thread(target=work)
    other.start()
    try:
        record = or_calls(CudaGraphs(torch.device("cuda")))
        recordings = [record(run, buffer) for buffer, _, run in (doubling(rows) for rows in range(1, 33))]
    finally:
        ended.append(True)
        other.join()
    assert all(one.is_graph for one in recordings)
