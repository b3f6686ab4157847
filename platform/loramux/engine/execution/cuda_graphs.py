"""Steps as CUDA graphs: one for each bucket of rows serves every mix of adapters, contexts and pages.

A graph replays launches with the addresses that they were captured with. So everything that differs between steps is
data at fixed addresses. Token ids, positions, slots, block tables and work lists are in `StepBuffers`, which one copy a
step fills. The persistent attention and LoRA launches read the lists, and the lists' lengths, from the device. Two
kinds of recordings:

- `DecodeGraphs`: whole decode steps, from the tokens of the step before to this step's tokens. A bucket needs three (no
  adapter; adapters row by row; adapters in tensor-core tiles), not one for each mix, and none for a way of sampling:
  programs for rows that do not ask for something end at once.
- `DecoderGraphs`: everything between the embedding and the head. They serve any step, also steps with a prompt, and
  steps with adapters that are more than pairs on linears. The operators before and after it are launched one at a time:
  a dozen launches, which depend on the sampled rows and on the adapters' own tokens.

Rows that only pad a bucket have no slot, no work item and no parameters of sampling: they store nothing, and no token
is chosen for them.

**Invariant: every tensor that a graph reads lives as long as the graph.** torch does not keep a graph's inputs alive,
and its allocator gives freed memory to other tensors. A `Recording` therefore holds its inputs, and `StepBuffers` owns
what its views show. Source: PyTorch's notes on CUDA graphs ("the graph reads and writes the same virtual addresses on
every replay"); vLLM and SGLang pad decode batches to captured sizes likewise.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.runner import Decode, Forward, PackedStep, StepGraphs
from loramux.engine.execution.step_buffers import MOST_RECORDED_ROWS, StepBuffers
from loramux.engine.execution.vision import StepImages
from loramux_adapters.bank import StepExtras
from loramux_adapters.ranks import Ranks
from loramux_kernels.cuda.work_lists import (
    DECODE_SHAPES,
    LONG,
    SHORT,
    SHORT_SEGMENT_ROWS,
    AttentionShape,
    TileMap,
    TileShape,
    attach_attention,
    attach_states,
    attached_tile_map,
    decode_shape,
    refill_attention,
    reserve_attention,
    reserve_states,
)
from loramux_kernels.tables import AttentionBatch, Segments, prompt_ends

logger = logging.getLogger(__name__)

RECORDING = threading.Lock()
"""Lock held while a step is recorded. Engines of one process record one after the other, because a recording
synchronises the device and empties the allocator's cache, which fails during another recording."""

MIN_PARTIALS = 128
"""Least number of pieces that contexts may be cut into: enough that every multiprocessor has something to read."""


class ReservedAttention:
    """Work lists at fixed addresses, for each kind of attention that a model's layers use in one forward, and for
    states of fixed size."""

    def __init__(self, shapes: Iterable[AttentionShape], buffers: StepBuffers) -> None:
        sequences, rows = buffers.max_sequences, min(buffers.max_rows, MOST_RECORDED_ROWS)
        partials = max(MIN_PARTIALS, 2 * sequences)
        self._tiles = {shape: reserve_attention(shape, sequences, rows, partials, buffers.memory) for shape in shapes}
        self._states = reserve_states(sequences, rows, buffers.memory) if buffers.state_pages else None

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """The kinds of attention."""
        return tuple(self._tiles)

    def attach(self, batch: AttentionBatch, heights: int) -> None:
        """Make launches for `batch` read the lists of the first `heights` tile heights; one is enough for decoding."""
        for shape, tiles in self._tiles.items():
            attach_attention(batch, shape, tiles[:heights])
        if self._states is not None:
            attach_states(batch, self._states.of_single_rows if heights == 1 else self._states)

    def refill(self, packed: PackedStep, heights: int) -> None:
        """Put a step's sequences into the lists."""
        spans = np.column_stack((packed.cu_seqlens[:-1], packed.cu_seqlens[1:], packed.context_lens)).astype(np.int64)
        for shape, tiles in self._tiles.items():
            if shape.sees_ahead and packed.row_ends is None:
                continue  # no launch of this step reads these lists
            refill_attention(tiles[:heights], spans, packed.table_rows, shape)
        if self._states is not None:
            lists = self._states.of_single_rows if heights == 1 else self._states
            ends = np.array(prompt_ends(spans, packed.prompt_lens), dtype=np.int64)
            lists.refill(spans, ends, packed.table_rows, packed.draft_lens)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded function; `replay` runs it on `inputs`."""

    replay: Callable[[], object]
    inputs: object
    """Owners of everything that the recorded launches read, except the model's weights. They are held to keep them
    alive, and are never read."""
    is_graph: bool = False
    """True if `replay` launches a CUDA graph. If not, it calls the function, which takes the host 10 to 20 times as
    long."""


class GraphRecorder(Protocol):
    """Records functions that read and write the same addresses at every call."""

    def __call__(self, function: Callable[[], object], inputs: object) -> Recording:
        """Record `function`, which reads `inputs` and writes its result to memory that outlives the call."""


class CaptureFailed(RuntimeError):
    """A function ran, and could not be captured."""


class CudaGraphs:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all, because the allocator keeps memory that a stream has freed for that stream.
        self._warm_up = torch.cuda.Stream(device)
        # Compares every input's storage at each replay. This costs host time, so it is only for tests and debugging.
        wanted = os.environ.get("LORAMUX_CHECK_GRAPH_INPUTS") == "1"
        offered = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
        self._options: dict[str, Any] = {"check_input_liveness": True} if wanted and offered else {}

    def __call__(self, function: Callable[[], object], inputs: object) -> Recording:
        """Record `function`, after one run outside the graph, which makes what is made on first use: kernels, tables,
        workspaces. Raises CaptureFailed if the function ran and the capture failed."""
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._warm_up.wait_stream(current)
        with torch.cuda.stream(self._warm_up):
            function()
        current.wait_stream(self._warm_up)
        try:
            # `graph` leaves its own stream current if the capture's end fails; the outer context restores `current`. By
            # thread: CUDA calls of the process's other threads (loads, another engine's steps) are allowed.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local", **self._options),
            ):
                function()
        except RuntimeError as error:
            # The allocator may still count the failed capture as one that fills the pool, and would refuse the next.
            self._pool = torch.cuda.graph_pool_handle()
            raise CaptureFailed(str(error)) from error
        return Recording(graph.replay, inputs, is_graph=True)


def record_calls(function: Callable[[], object], inputs: object) -> Recording:
    """Record without graphs: a replay calls `function` on the same buffers, with the same result."""
    return Recording(function, inputs)


def choose_recorder(function: Callable[[], object], device: torch.device, *, over_ranks: bool = False) -> GraphRecorder:
    """Return the recorder for functions like `function` on `device`. If it syncs, which a graph cannot hold, this
    records calls. `over_ranks`: functions have sums over ranks."""
    syncs = host_syncs_of(function)
    if syncs:
        logger.warning("steps run without CUDA graphs: the model waits for the device in %s", sorted(syncs))
    return or_calls(CudaGraphs(device), over_ranks=over_ranks) if device.type == "cuda" and not syncs else record_calls


def or_calls(record: GraphRecorder, *, over_ranks: bool = False) -> GraphRecorder:
    """Return a recorder that uses `record`, one function at a time in this process, and calls for functions for which
    it fails.

    A function that fails says nothing about the next one: a smaller bucket fits into memory that was too little. Over
    ranks, a function that does not run on one rank leaves the others in the middle of its sums, so its error is raised;
    a capture that fails has begun none.
    """
    failures = CaptureFailed if over_ranks else RuntimeError
    reasons: set[str] = set()

    def record_either(function: Callable[[], object], inputs: object) -> Recording:
        try:
            with RECORDING:
                return record(function, inputs)
        except failures as error:  # torch's out-of-memory error is a RuntimeError
            reason = type(error.__cause__ or error).__name__  # messages differ in their numbers of bytes
            if reason not in reasons:
                logger.warning("a step runs without a CUDA graph, slower: recording failed: %s: %s", reason, error)
            reasons.add(reason)
        return record_calls(function, inputs)

    return record_either


class StepEnds:
    """Launches before and after a step's forward, in a recording or out of one.

    Only rank 0 samples, so the other ranks get the token ids from its device: a few bytes, and no state of requests. A
    recording always broadcasts them; other steps only if the host does not know one of them.
    """

    def __init__(self, buffers: StepBuffers, sampler: DeviceSampler | None, ranks: Ranks | None) -> None:
        """`sampler`: None on other ranks than rank 0."""
        self._buffers, self.sampler, self._ranks = buffers, sampler, ranks

    def begin(self, input_ids: torch.Tensor, *, follows_unknown_tokens: bool = True) -> None:
        """Launch what a forward of `input_ids` reads and the step's copy does not hold: new pages in their tables, and
        the tokens of the step before."""
        self._buffers.block_tables.apply()
        if self.sampler is not None:
            self.sampler.insert_pending(input_ids)
        if self._ranks is not None and follows_unknown_tokens:
            self._ranks.broadcast(input_ids)

    def choose(self, logits: torch.Tensor) -> None:
        """Launch the choice of a recorded step's tokens."""
        if self.sampler is not None:
            self.sampler.choose(logits)


NO_SEGMENTS = Segments((0,), ())
"""Segments of a step without adapters."""


@dataclass(frozen=True, slots=True)
class _Graph:
    recording: Recording
    tile_map: TileMap | None
    """Tiles of the adapters' launches; None if no launch multiplies by adapters."""

    def refill(self, packed: PackedStep, ranks: Sequence[int]) -> None:
        """Put the step's segments into the tiles; `ranks` are the segments' largest ranks."""
        if self.tile_map is not None:
            self.tile_map.refill(packed.segments or NO_SEGMENTS, np.asarray(ranks, dtype=np.int64))


def _tile_map_of(segments: Segments | None) -> TileMap | None:
    return None if segments is None else attached_tile_map(segments)


def count_graphs(recorded: Collection[_Graph]) -> StepGraphs:
    """Count the recordings that are graphs, and those that are calls."""
    graphs = sum(one.recording.is_graph for one in recorded)
    return StepGraphs(graphs, len(recorded) - graphs)


class DecodeGraphs:
    """Recordings of whole decode steps over `buffers`, all made at construction: no request waits for one."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        attention: ReservedAttention,
        record: GraphRecorder,
        logits: torch.Tensor,
        ends: StepEnds,
        most_buckets: int | None = None,
        *,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """`logits`: logits of any row, `[1, vocab]`; `most_buckets`: record only that many buckets, the largest.
        `hidden` `[sequences, hidden]`: memory for the rows' hidden states; None: they are not kept."""
        self._forward, self._buffers, self._attention, self._ends = forward, buffers, attention, ends
        self._buckets = decode_buckets(buffers.max_sequences)
        # One result for all graphs: separate results would keep rows x vocabulary of the card's memory for each graph.
        self._logits = logits.new_empty(buffers.max_sequences, logits.shape[1])
        self._hidden = hidden
        self._graphs = {
            (rows, kind): self._record(record, rows, kind)
            for rows in self._buckets[::-1][:most_buckets]  # the largest first: the others fit into its memory
            for kind in (None, *decode_shapes(is_invariant=buffers.is_invariant))
        }

    @property
    def count(self) -> StepGraphs:
        """Counts of the recordings that are graphs and that are calls."""
        return count_graphs(self._graphs.values())

    def stage(self, packed: PackedStep, ranks: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Put a decode step's work lists into the buffers, and return the function that runs the step once they are
        sent.

        The function returns the logits `[S, vocab]`, valid until the next run, and has chosen the tokens of the rows
        that the sampler has staged for recordings. `ranks` are the largest ranks of each segment's adapter.
        """
        count = len(packed.input_ids)
        rows = next(bucket for bucket in self._buckets if bucket >= count)
        kind = None
        if packed.segments is not None:
            kind = SHORT if self._buffers.is_invariant else decode_shape(packed.segments, ranks)
        graph = self._graphs[rows, kind]
        self._attention.refill(packed, heights=1)
        graph.refill(packed, ranks)

        def run() -> torch.Tensor:
            graph.recording.replay()
            return self._logits[:count]

        return run

    def _record(self, record: GraphRecorder, rows: int, kind: TileShape | None) -> _Graph:
        inputs, output = self._buffers.padded(rows), self._logits[:rows]
        self._attention.attach(inputs.batch, heights=1)
        segments = None if kind is None else self._buffers.padded_segments(rows, (kind,))

        hidden = None if self._hidden is None else self._hidden[:rows]

        def run() -> None:
            self._ends.begin(inputs.input_ids)
            self._forward.keep_hidden(hidden is not None)
            output.copy_(self._forward(inputs, segments))
            if hidden is not None:
                hidden.copy_(self._forward.take_hidden())
                self._forward.keep_hidden(False)  # a kept result of a later recording would hold its memory
            self._ends.choose(output)

        return _Graph(record(run, (inputs, segments, self._ends, hidden)), _tile_map_of(segments))


DecoderKind = Literal["base", "prompts", "pairs", "extras", "images"]
"""Parts of adapters that a recording's launches add to the base: none, pairs on linears for long segments only, pairs
for any segments, or all. Pairs for any segments are two launches each, and an empty one takes microseconds too. In
families whose layers treat rows of images differently, steps with such rows have separate recordings, with all
parts of adapters ("images"). In other families an image changes only the inputs of the recorded part."""

KINDS: tuple[DecoderKind, ...] = ("images", "extras", "pairs", "prompts", "base")


class DecoderGraphs:
    """Recordings of the decoder over `buffers` for steps of any chunks, all made at construction."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        attention: ReservedAttention,
        record: GraphRecorder,
        hidden_size: int,
        most_buckets: int | None = None,
    ) -> None:
        """`most_buckets`: record only that many buckets of rows, the largest."""
        self._forward, self._buffers, self._attention = forward, buffers, attention
        self._buckets = step_buckets(min(buffers.max_rows, MOST_RECORDED_ROWS))
        rows_of_steps = forward.bank.pool.new_zeros(2 + forward.effects.num_deep_rows, self._buckets[-1], hidden_size)
        self._hidden, self._features = rows_of_steps[0], rows_of_steps[1:]
        self._has_images = forward.effects.reaches_layers
        self._graphs = {
            (rows, kind): self._record(record, rows, kind)
            for rows in self._buckets[::-1][:most_buckets]
            for kind in kinds_of(rows, is_invariant=buffers.is_invariant, has_images=self._has_images)
        }

    @property
    def count(self) -> StepGraphs:
        """Counts of the recordings that are graphs and that are calls."""
        return count_graphs(self._graphs.values())

    def stage(
        self, packed: PackedStep, ranks: Sequence[int], extras: StepExtras | None, images: StepImages | None = None
    ) -> Decode | None:
        """Put a step's work lists into the buffers, and return the decoder that runs it once they are sent; None if the
        step is larger than every recorded one.

        The decoder's result is valid until the next step.
        """
        count = len(packed.input_ids)
        rows = next((bucket for bucket in self._buckets if bucket >= count), None)
        if rows is None:
            return None
        kind = kind_of(packed.segments, ranks, extras, has_images=self._has_images and images is not None)
        graph = self._graphs[rows, "pairs" if kind == "prompts" and self._buffers.is_invariant else kind]
        self._attention.refill(packed, heights=2)
        graph.refill(packed, ranks)

        def decode(embeddings: torch.Tensor) -> torch.Tensor:
            self._features[0, :count].copy_(embeddings)
            if images is not None:
                deep = self._features[1:, :count].zero_()
                deep[:, images.rows] = images.features[1:]
            graph.recording.replay()
            return self._hidden[:count]

        return decode

    def _record(self, record: GraphRecorder, rows: int, kind: DecoderKind) -> _Graph:
        inputs, bank = self._buffers.padded(rows, with_ends=kind == "images"), self._forward.bank
        features, hidden = self._features[:, :rows], self._hidden[:rows]
        if kind == "images":
            inputs = replace(inputs, images=StepImages(slice(None), features))
        self._attention.attach(inputs.batch, heights=2)
        both = (SHORT,) if self._buffers.is_invariant else (SHORT, LONG)
        shapes = {"base": (), "prompts": (LONG,)}.get(kind, both)
        segments = self._buffers.padded_segments(rows, shapes) if shapes else None
        extras = None
        if kind in ("extras", "images"):
            extras = StepExtras(segments, segments, segments if bank.norms else None, embedding=(), head=())

        def run() -> None:
            hidden.copy_(self._forward.hidden_states(features[0], inputs, segments, extras))

        return _Graph(record(run, (features, inputs, segments)), _tile_map_of(segments))


def kind_of(
    segments: Segments | None, ranks: Sequence[int], extras: StepExtras | None, *, has_images: bool = False
) -> DecoderKind:
    """Return the kind of recording that a step needs; `ranks` are the segments' largest ranks, and `has_images` tells
    if layers treat some of its rows as those of images.

    Changes of embeddings or logits alone are outside of recordings.
    """
    if has_images:
        return "images"
    if segments is None:
        return "base"
    if extras is not None and (extras.columns or extras.inputs or extras.norms):
        return "extras"
    lengths = np.diff(segments.cu_seqlens)[np.asarray(ranks) > 0]
    if not len(lengths):
        return "base"
    return "prompts" if (lengths > SHORT_SEGMENT_ROWS).all() else "pairs"


def count_recordings(
    max_sequences: int,
    max_rows: int,
    *,
    is_invariant: bool = False,
    has_images: bool = False,
    has_head: bool = False,
) -> int:
    """Return the number of recordings of an engine whose steps have up to `max_sequences` and `max_rows` rows.
    `has_head`: a head for multi-token prediction follows them."""
    steps = step_buckets(min(max_rows, MOST_RECORDED_ROWS))
    shapes = decode_shapes(is_invariant=is_invariant)
    of_steps = sum(len(kinds_of(rows, is_invariant=is_invariant, has_images=has_images)) for rows in steps)
    of_head = len(steps) if has_head else 0
    return len(decode_buckets(max_sequences)) * (1 + len(shapes)) + of_steps + of_head


def decode_shapes(*, is_invariant: bool) -> tuple[TileShape, ...]:
    """Return the shapes of adapters' tiles for which decode steps are recorded."""
    return (SHORT,) if is_invariant else DECODE_SHAPES


def kinds_of(rows: int, *, is_invariant: bool, has_images: bool) -> tuple[DecoderKind, ...]:
    """Return the kinds for which a step of `rows` rows is recorded. Few rows hold no long segment, and if no row's
    result may depend on others, long segments are computed as short ones. `has_images`: layers treat rows of images
    differently."""
    left_out: set[DecoderKind] = set() if has_images else {"images"}
    if rows <= SHORT_SEGMENT_ROWS or is_invariant:
        left_out.add("prompts")
    return tuple(kind for kind in KINDS if kind not in left_out)


def decode_buckets(most: int) -> tuple[int, ...]:
    """Return the row counts for which decode steps are recorded, `most` the last: a step runs in the smallest that
    holds it.

    Powers of two up to 8, then steps of 8, from 128 on of 16: padding costs at most an eighth.
    """
    return _up_to(most, (1, 2, 4, *range(8, min(most, 128), 8), *range(128, most, 16)))


def step_buckets(most: int) -> tuple[int, ...]:
    """Return the row counts for which any step is recorded, `most` the last.

    Powers of two up to 16, then two buckets an octave. From 256 rows on there are four an octave, because there padding
    costs arithmetic: a fifth at most.
    """
    few = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
    return _up_to(most, (*few, *(step << n for n in range(6, most.bit_length()) for step in (4, 5, 6, 7))))


def _up_to(most: int, counts: Iterable[int]) -> tuple[int, ...]:
    return (*(count for count in counts if count < most), most)


HOST_SYNC_OPERATORS = frozenset(
    ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
)
"""Operators that make the host wait for a value, or for a shape that depends on one."""

HOST_SYNC_METHODS = frozenset(("tolist", "cpu", "numpy", "item"))
"""Methods of a tensor that make the host wait too; on a CPU tensor some of them run no operator at all."""


def host_syncs_of(function: Callable[[], object]) -> set[str]:
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
    """Notes methods that read a tensor's values on the host, so a test on a CPU finds where the host would wait for a
    GPU."""

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
    """Does a copy end on the host? A copy into pinned memory does not wait, but a graph would repeat it at every
    replay."""
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    return source.device.type != "cpu" and target.type == "cpu"
