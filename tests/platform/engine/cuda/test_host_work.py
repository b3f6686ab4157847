"""How much work a decode step is for the host: counted, so that more is noticed. Times are in benchmarks/step_cost.py.

The count is that of Python's bytecode instructions, which is exact, and the same on every machine.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from idle_device import BLOCK, IdleDevice, Load, no_launches
from manual_clock import ManualClock

from loramux.engine.engine import Engine

ROWS, CONTEXT = 32, 100
LONGER = 2000 * BLOCK
"""Tokens that a long context has in addition: whole pages, so that both take pages in the same steps."""

KINDS = {
    "plain": Load(ROWS, CONTEXT),
    "adapters": Load(ROWS, CONTEXT, 8),
    "penalties": Load(ROWS, CONTEXT, sampling={"frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "biases": Load(ROWS, CONTEXT, sampling={"logit_bias": {5: 1.0}, "min_tokens": 3000}),
    "draws": Load(ROWS, CONTEXT, sampling={"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1}),
    "logprobs": Load(ROWS, CONTEXT, sampling={"logprobs": 5}),
}

INSTRUCTIONS = {
    "plain": (9300, 244),
    "adapters": (12_600, 244),
    "penalties": (9600, 251),
    "biases": (9500, 278),
    "draws": (9300, 244),
    "logprobs": (9800, 456),
}
"""Most instructions of a step in which no sequence takes a page, without its rows, and most of each row. The first
number has room for other versions of libraries. With eight adapters, each has a segment of rows."""

INSTRUCTIONS_OF_A_PAGE = 700
"""Most instructions of a sequence that fills a page, publishes it and takes the next."""

ELEMENTS_OF_A_ROW = 4
"""Most pages and tokens of a sequence that a step reads, on average."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleDevice]:
    with no_launches():
        yield IdleDevice(tmp_path_factory.mktemp("idle"))


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def decoding(device: IdleDevice, load: Load) -> Engine:
    """Return an engine whose clock stands still, so that no statistics are due."""
    return device.decoding(load, ManualClock(1000.0))


def run_step(engine: Engine) -> bytes:
    """Run a step, and make the bytes that the server gets."""
    return msgspec.msgpack.encode(engine.step())


def count_instructions(function: Callable[[], object]) -> int:
    """Return the bytecode instructions that Python executes for a call, those of libraries included."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def instructions(engine: Engine) -> list[int]:
    """Return the instructions of each of as many steps as a page has tokens, so that each sequence fills one page."""
    return [count_instructions(lambda: run_step(engine)) for _ in range(BLOCK)]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other instructions")
@pytest.mark.parametrize("kind", KINDS)
def test_decode_step_takes_no_more_instructions_than_it_did(device: IdleDevice, kind: str) -> None:
    load = KINDS[kind]
    few, many = (instructions(decoding(device, replace(load, rows=rows))) for rows in (ROWS, 2 * ROWS))
    per_row = (min(many) - min(few)) / ROWS
    found, most = (min(few) - ROWS * per_row, per_row), INSTRUCTIONS[kind]
    assert found[0] <= most[0], found
    assert found[1] <= most[1], found
    assert sum(many) - BLOCK * min(many) <= 2 * ROWS * INSTRUCTIONS_OF_A_PAGE


class Counted:
    """Counts the elements of containers that are read."""

    elements = 0


def counted(kind: type) -> type:
    """Return a container like `kind` whose elements are counted as they are read: compared, copied, iterated over."""

    def counts(name: str) -> Callable[..., Any]:
        of_kind = getattr(kind, name)

        def run(self: Any, *args: Any) -> Any:
            chosen = args[0] if name == "__getitem__" else slice(None)
            Counted.elements += len(range(*chosen.indices(len(self)))) if isinstance(chosen, slice) else 1
            return of_kind(self, *args)

        return run

    names = ("__getitem__", "__iter__", "__eq__", "__ne__", "__contains__", "__add__", "__reversed__", "index")
    return type(f"Counted{kind.__name__}", (kind,), {name: counts(name) for name in names if hasattr(kind, name)})


def elements_read(engine: Engine) -> int:
    """Return the pages and tokens of running sequences that a step reads."""
    numbers, lists = counted(array), counted(list)
    for sequence in engine.scheduler.running:
        sequence.pages = numbers("i", sequence.pages)
        sequence.token_ids, sequence.prefix_pages = lists(sequence.token_ids), lists(sequence.prefix_pages)
    Counted.elements = 0
    for _ in range(BLOCK):
        run_step(engine)
    return Counted.elements // BLOCK


def bytes_allocated(engine: Engine) -> int:
    """Return the memory that a step holds at most, those of libraries included."""
    tracemalloc.start()
    run_step(engine)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    run_step(engine)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


@pytest.mark.parametrize("kind", KINDS)
def test_decode_step_does_the_same_work_after_a_long_context(device: IdleDevice, kind: str) -> None:
    """The loops of C are no instructions of Python: what they read and copy is counted as well."""
    load = KINDS[kind]
    short, long = (decoding(device, one) for one in (load, replace(load, context=load.context + LONGER)))
    few, many = instructions(short), instructions(long)
    assert min(few) == min(many)
    assert sum(many) - BLOCK * min(many) <= ROWS * INSTRUCTIONS_OF_A_PAGE
    assert elements_read(long) <= ROWS * ELEMENTS_OF_A_ROW
    tables = ROWS * LONGER // BLOCK
    assert bytes_allocated(long) < bytes_allocated(short) + tables
