"""Decode steps as CUDA graphs: one for each bucket of rows serves every mix of adapters, contexts and pages.

A graph replays launches with the addresses that they were captured with. So everything that differs between decode
steps is data at fixed addresses: token ids, positions, slots and block tables in `StepBuffers`; the work lists that
the persistent attention and LoRA launches walk through, whose length they read from the device. A bucket needs three
graphs (no adapter; adapters row by row; adapters in tensor-core tiles), not one for each mix. Rows that only pad a
bucket have no slot and no work item: they store nothing.

**Invariant: every tensor that a graph reads lives as long as the graph.** torch does not keep a graph's inputs alive,
and its allocator gives freed memory to other tensors. A `Recording` therefore holds its inputs, and `StepBuffers` owns
what its views show. Source: PyTorch's notes on CUDA graphs ("the graph reads and writes the same virtual addresses on
every replay"); vLLM and SGLang pad decode batches to captured sizes likewise.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.engine.execution.runner import Forward, PackedStep, StepInputs
from loramux.engine.scheduling.step import PENDING
from loramux_kernels import AttentionBatch, Segments
from loramux_kernels.cuda.attention_plan import (
    AttentionShape,
    AttentionTiles,
    attach_attention,
    attention_shapes,
    refill_attention,
    reserve_attention,
)
from loramux_kernels.cuda.tile_map import DECODE_SHAPES, TileMap, TileShape, attach_tile_map, decode_shape
from loramux_kernels.device import stage, to_device

logger = logging.getLogger(__name__)

NO_SLOT = -1
"""A padding row in `slot_mapping`: its KV is stored nowhere."""

MIN_PARTIALS = 128
"""Pieces that contexts may be cut into: enough to give every multiprocessor something to read."""

Kind = TileShape | None
"""The way in which a graph multiplies by adapters; None where it launches nothing for them."""


class StepBuffers:
    """Inputs of steps up to `max_rows` rows and `max_sequences` sequences of `max_blocks` pages each, on the device.

    The tensors are allocated once and filled from pinned memory without waiting, so views of them keep their addresses.
    """

    def __init__(self, max_rows: int, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self.max_sequences = max_sequences
        self._device = device
        # Rows: input ids, positions, slots, and for PENDING tokens the row that sampled them in the step before.
        self._rows = torch.zeros(4, max_rows, dtype=torch.int64, device=device)
        self._rows[2] = NO_SLOT
        self._block_table = torch.zeros(max_sequences, max_blocks, dtype=torch.int32, device=device)
        # A decode step samples every row. Graphs read this tensor, so it must not be made for each of them.
        self._every_row = torch.arange(max_sequences, device=device)

    def fill(self, packed: PackedStep, sources: NDArray[np.int64], sampled: torch.Tensor | None) -> StepInputs:
        """Replace the buffers' contents by a step's.

        A PENDING token is taken from `sampled`, the tokens that an earlier step leaves on the device: row i's from
        `sampled[sources[i]]`.
        """
        length, (sequences, blocks) = len(packed.input_ids), packed.block_table.shape
        rows = np.zeros(self._rows.shape, dtype=np.int64)
        rows[2] = NO_SLOT
        rows[:, :length] = packed.input_ids, packed.position_ids, packed.slot_mapping, sources
        self._rows.copy_(stage(rows, self._device), non_blocking=True)
        if PENDING in packed.input_ids:
            assert sampled is not None, "a pending token was sampled by the step before"
            ids = self._rows[0]
            ids.copy_(torch.where(ids == PENDING, sampled[self._rows[3].clamp(min=0)], ids))
        self._block_table[:sequences, :blocks].copy_(stage(packed.block_table, self._device), non_blocking=True)
        return StepInputs(
            input_ids=self._rows[0, :length],
            position_ids=self._rows[1, :length],
            # The kernels' work lists are cut from the lengths on the host, so these two stay there.
            batch=AttentionBatch(
                cu_seqlens=torch.from_numpy(packed.cu_seqlens),
                context_lens=torch.from_numpy(packed.context_lens),
                block_table=self._block_table[:sequences],
                slot_mapping=self._rows[2, :length],
            ),
            sampled_rows=to_device(packed.sampled_rows, self._device),
        )

    def padded(self, rows: int) -> StepInputs:
        """Return the first `rows` rows as a decode step's inputs, which follow whatever is filled in later."""
        return StepInputs(
            input_ids=self._rows[0, :rows],
            position_ids=self._rows[1, :rows],
            batch=AttentionBatch(
                cu_seqlens=torch.arange(rows + 1, dtype=torch.int32),
                context_lens=torch.ones(rows, dtype=torch.int32),
                block_table=self._block_table[:rows],
                slot_mapping=self._rows[2, :rows],
            ),
            sampled_rows=self._every_row[:rows],
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """`replay` brings `output` up to date with `inputs`."""

    replay: Callable[[], object]
    output: torch.Tensor
    inputs: object
    """The owners of everything that the recorded launches read, the model's own weights aside; held, never read."""


class Recorder(Protocol):
    """Records functions that read and write the same addresses at every call."""

    def __call__(self, function: Callable[[], torch.Tensor], inputs: object) -> Recording:
        """Call `function`, which reads `inputs`, at least once."""


class CudaGraphs:
    """Records CUDA graphs that share one memory pool: a graph's output lasts until the next one is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: the allocator keeps what a stream has freed for that stream.
        self._warm_up = torch.cuda.Stream(device)
        # Compares every input's storage at each replay, which costs host time: for tests and fault finding.
        wanted = os.environ.get("LORAMUX_CHECK_GRAPH_INPUTS") == "1"
        offered = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
        self._options: dict[str, Any] = {"check_input_liveness": True} if wanted and offered else {}

    def __call__(self, function: Callable[[], torch.Tensor], inputs: object) -> Recording:
        """Run `function` once outside the graph, for what is made on first use: kernels, tables, workspaces."""
        self._warm_up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._warm_up):
            function()
        torch.cuda.current_stream(self._device).wait_stream(self._warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, **self._options):
            output = function()
        return Recording(graph.replay, output, inputs)


def record_calls(function: Callable[[], torch.Tensor], inputs: object) -> Recording:
    """Record without graphs: a replay calls `function` again, with the same buffers and the same result."""
    output = function()
    return Recording(lambda: output.copy_(function()), output, inputs)


def choose_recorder(function: Callable[[], torch.Tensor], device: torch.device) -> Recorder:
    """Return what records functions like `function` on `device`: calls where it syncs, which no graph can hold."""
    syncs = host_syncs_of(function)
    if syncs:
        logger.warning("decode steps run without CUDA graphs: the model waits for the device in %s", sorted(syncs))
    return or_calls(CudaGraphs(device)) if device.type == "cuda" and not syncs else record_calls


def or_calls(record: Recorder) -> Recorder:
    """Record by `record`, and by calls from the first function on that it fails for (memory, a new driver)."""
    failed = False

    def record_either(function: Callable[[], torch.Tensor], inputs: object) -> Recording:
        nonlocal failed
        if not failed:
            try:
                return record(function, inputs)
            except RuntimeError as error:  # torch's out-of-memory error is one
                failed = True
                logger.warning("some decode steps run without CUDA graphs, slower: recording failed: %s", error)
        return record_calls(function, inputs)

    return record_either


@dataclass(frozen=True, slots=True)
class _DecodeGraph:
    recording: Recording
    tile_map: TileMap | None


class DecodeGraphs:
    """Recordings of the forward over `buffers`, all made at construction: no request waits for one."""

    def __init__(self, forward: Forward, buffers: StepBuffers, record: Recorder, max_rank: int) -> None:
        self._forward = forward
        self._buffers = buffers
        self._device = forward.bank.pool.device
        self._max_rank = max_rank
        self._buckets = buckets(buffers.max_sequences)
        with_one_row = buffers.padded(1)
        logits = forward(with_one_row, None)
        # One for all graphs: a result of each one's own would keep rows x vocabulary of the card's memory for ever.
        self._logits = logits.new_empty(buffers.max_sequences, logits.shape[1])
        self._attention = self._reserve_attention(attention_shapes(with_one_row.batch))
        self._graphs = {
            (rows, kind): self._record(record, rows, kind)
            for rows in reversed(self._buckets)  # the largest first: the others fit into its memory
            for kind in (None, *DECODE_SHAPES)
        }

    @property
    def attention_shapes(self) -> Sequence[AttentionShape]:
        """The kinds of attention that the model's layers ask for."""
        return tuple(self._attention)

    def run(self, packed: PackedStep, ranks: Sequence[int]) -> torch.Tensor:
        """Return the logits `[S, vocab]` of a decode step that the buffers hold; valid until the next run.

        `ranks` are the largest of each segment's adapter.
        """
        count = len(packed.input_ids)
        rows = next(bucket for bucket in self._buckets if bucket >= count)
        graph = self._graphs[rows, decode_shape(packed.segments, ranks) if packed.segments else None]
        if graph.tile_map is not None:
            assert packed.segments is not None
            graph.tile_map.refill(packed.segments, np.asarray(ranks, dtype=np.int64))
        spans = [(row, row + 1, context) for row, context in enumerate(packed.context_lens.tolist())]
        for shape, tiles in self._attention.items():
            refill_attention(tiles, spans, shape)
        graph.recording.replay()
        return graph.recording.output[:count]

    def _reserve_attention(self, shapes: Sequence[AttentionShape]) -> dict[AttentionShape, AttentionTiles]:
        """Reserve work lists for every kind of attention that the model's layers ask for in one forward."""
        sequences = self._buffers.max_sequences
        partials = max(MIN_PARTIALS, 2 * sequences)
        return {shape: reserve_attention(shape, sequences, partials, self._device) for shape in shapes}

    def _record(self, record: Recorder, rows: int, kind: Kind) -> _DecodeGraph:
        inputs = self._buffers.padded(rows)
        for shape, tiles in self._attention.items():
            attach_attention(inputs.batch, shape, tiles)
        output = self._logits[:rows]
        if kind is None:
            return _DecodeGraph(record(lambda: output.copy_(self._forward(inputs, None)), inputs), None)
        # One run of all rows stands for whatever the map will hold.
        segments = Segments((0, rows), (0,))
        tile_map = TileMap.reserve(rows, self._max_rank, kind, self._device)
        attach_tile_map(segments, tile_map)
        recording = record(lambda: output.copy_(self._forward(inputs, segments)), (inputs, segments))
        return _DecodeGraph(recording, tile_map)


def buckets(most: int) -> tuple[int, ...]:
    """Return the row counts that are recorded, `most` the last: a step runs in the smallest that holds it.

    Powers of two up to 8, then steps of 8, from 128 on of 16: padding costs at most an eighth.
    """
    counts = [1, 2, 4, *range(8, min(most, 128), 8), *range(128, most, 16)]
    return (*(count for count in counts if count < most), most)


HOST_SYNC_OPERATORS = frozenset(
    ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
)
"""Operators that make the host wait for a value, or for a shape that depends on one."""

HOST_SYNC_METHODS = frozenset(("tolist", "cpu", "numpy", "item"))
"""Methods of a tensor that do the same; on a CPU tensor some of them run no operator at all."""


def host_syncs_of(function: Callable[[], torch.Tensor]) -> set[str]:
    """Return the operators with which `function` makes the host wait for its device."""
    found: set[str] = set()
    with _MethodWatch(found), _OperatorWatch(found):
        function()
    return found


class _OperatorWatch(TorchDispatchMode):
    """Notes operators that a CUDA graph cannot hold, also those that other operators call."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if (
            name in HOST_SYNC_OPERATORS
            or (name.startswith("index") and _has_mask(args))
            or (name in ("_to_copy", "copy_") and _leaves_the_device(name, args, kwargs))
        ):
            self._found.add(name)
        return func(*args, **kwargs)


class _MethodWatch(TorchFunctionMode):
    """Notes methods that read a tensor's values on the host: a test on a CPU then finds what a GPU would wait for."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        words = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
        if name in HOST_SYNC_METHODS or (name == "to" and "cpu" in words):
            self._found.add(name)
        return func(*args, **kwargs)


def _has_mask(args: Sequence[Any]) -> bool:
    """Is one of an indexing operator's indices a mask, whose ones must be counted first?"""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def _leaves_the_device(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Does a copy end on the host? One into pinned memory does not wait, but a graph would copy to it for ever."""
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    return source.device.type != "cpu" and target.type == "cpu"
