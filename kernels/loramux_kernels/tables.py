"""The arguments that operators share: resident adapters, a step's rows, KV pages, and sampling parameters.

- `LoraTable`: the places of the resident adapters in the pool. `Segments`: the rows of each adapter in a step.
  `LoraGroup`: linears that read the same input, served by one launch.
- `PendingExpand`: an expand that is left to a later operator.
- `Routes`: the rows of a step that each expert of a mixture computes.
- `KvLayer`: one layer's keys and values as views of the pool. `AttentionBatch`: the pages with the context of each
  sequence.
- `StateLayer`: one layer's states of fixed size as units of the pool, of `StateShape`. `StateRows`, `StateWeights`: the
  other arguments of layers that keep such states (linear attention, Mamba 2).
- `Norm`, `OwnWeights`, `Rotation`: the normalisation of rows, the weights for it, and the rotation of heads by
  position.
- `Penalties`, `LogitBias`, `SamplingBatch`: the choice of a token from each row of logits.

All these types are plain data. A device's derived tables (work lists, addresses for C++) are made on first use and kept
with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn import functional

from loramux_kernels.device import to_device
from loramux_kernels.native.abi import AttentionBatchAbi, KvLayerAbi, LoraTableAbi, NormAbi

RANK_TILE = 16
"""Rank rows of one tile; a tile is contiguous in the pool and never crosses the end of a page."""


@dataclass(frozen=True, eq=False)
class LoraTable:
    """Places of the resident adapters in the pool: a row per slot (resident revision), a column per site (linear).

    Tile j of (slot, site) holds rank rows [16j, min(16j + 16, rank)): rows of A have length in_features; B is stored
    transposed, its rows have length out_features. Offsets count elements of the pool, from its start.
    """

    a_offsets: torch.Tensor
    """int64[num_slots, num_sites, max_tiles]"""
    b_offsets: torch.Tensor
    """int64[num_slots, num_sites, max_tiles]"""
    ranks: torch.Tensor
    """int32[num_slots, num_sites]; 0 if the adapter does not change the site"""
    scales: torch.Tensor
    """float32[num_slots, num_sites]"""

    @cached_property
    def transposed(self) -> LoraTable:
        """The table of the transposed adapters: their A is this table's B, transposed, and the other way round."""
        return LoraTable(self.b_offsets, self.a_offsets, self.ranks, self.scales)

    @cached_property
    def abi(self) -> LoraTableAbi:
        """Addresses of the tensors for the C++ operators."""
        tensors = (self.a_offsets, self.b_offsets, self.ranks, self.scales)
        assert all(tensor.is_contiguous() for tensor in tensors), "rows are found by arithmetic"
        return LoraTableAbi(*(tensor.data_ptr() for tensor in tensors), *self.a_offsets.shape[1:])


@dataclass(frozen=True)
class Segments:
    """Rows of one step, contiguous by revision; the base model's rows come last and belong to no segment."""

    cu_seqlens: tuple[int, ...]
    """[S + 1], starting with 0; rows from cu_seqlens[-1] on are the base model's."""
    slots: tuple[int, ...]
    """[S]: the slot of each segment's adapter."""

    def __post_init__(self) -> None:
        assert len(self.cu_seqlens) == len(self.slots) + 1, "one slot for each run of rows"
        assert self.cu_seqlens[0] == 0, "the first segment starts at row 0"

    @property
    def rows(self) -> int:
        """Rows that belong to an adapter."""
        return self.cu_seqlens[-1]

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(slot, first row, one past the last row) of each segment."""
        return tuple((slot, a, b) for slot, (a, b) in zip(self.slots, pairwise(self.cu_seqlens), strict=True))

    @cached_property
    def packed(self) -> array[int]:
        """The number of segments, cu_seqlens and slots, in the form that the C++ operators read."""
        return array("q", (len(self.slots), *self.cu_seqlens, *self.slots))

    def among(self, rows: torch.Tensor) -> Segments | None:
        """Return the segments of `rows` alone, int64`[n]` and ascending; None if no row of them has an adapter."""
        edges = torch.tensor(self.cu_seqlens)
        ends = torch.searchsorted(rows, edges).tolist()
        spans = [(slot, end) for slot, (start, end) in zip(self.slots, pairwise(ends), strict=True) if end > start]
        return Segments((0, *(end for _, end in spans)), tuple(slot for slot, _ in spans)) if spans else None

    def row_slots(self, device: torch.device) -> torch.Tensor:
        """Return int64[rows]: each row's slot, negative for none. Made on first use."""
        if "_row_slots" not in vars(self):
            lengths = torch.tensor([last - first for _, first, last in self.spans])
            slots = torch.repeat_interleave(torch.tensor(self.slots, dtype=torch.int64), lengths)
            self.use_row_slots(to_device(slots.numpy(), device))
        found: torch.Tensor = vars(self)["_row_slots"]
        return found

    def use_row_slots(self, slots: torch.Tensor) -> None:
        """Have every launch read the rows' slots from `slots`, whose contents may change between steps."""
        vars(self)["_row_slots"] = slots

    def max_rank(self, table: LoraTable) -> int:
        """Return the largest rank of these slots on any site; the result is kept, because a step uses one table."""
        if "_max_rank" not in vars(self):
            vars(self)["_max_rank"] = int(table.ranks[list(self.slots)].max()) if self.slots else 0
        found: int = vars(self)["_max_rank"]
        return found


@dataclass(frozen=True)
class HeadColumns:
    """Columns of one linear's matrix by heads: head h has the columns `[first + h * step, first + h * step + width)`.

    `width` is that of a head's input in `lora_shrink`, and of its output in `lora_expand`.
    """

    width: int
    first: int
    step: int
    """Columns from a head to the next; 0: all heads have the same columns."""
    row: int
    """Elements of a whole row of the matrix."""


@dataclass(frozen=True)
class LoraGroup:
    """Linears that read the same input (q, k, v; gate, up): one shrink for all, one expand into their slices.

    Or the heads of one linear, each with its own input and output: then `heads` is set, and x and y are `[T, heads,
    width]`.
    """

    sites: tuple[int, ...]
    """Columns of the table."""
    out_features: tuple[int, ...]
    """Widths of the slices of the joined output, in the same order."""
    heads: HeadColumns | None = None
    """Columns of A in `lora_shrink`, and of B transposed in `lora_expand`; None: all columns of each linear."""

    @classmethod
    def of_heads(cls, site: int, num_heads: int, heads: HeadColumns) -> LoraGroup:
        """Return the group of one linear's heads."""
        return cls((site,) * num_heads, (heads.width,) * num_heads, heads)

    @cached_property
    def out_starts(self) -> tuple[int, ...]:
        """[len(sites) + 1]: the first column of each slice, and the width of all."""
        starts = [0]
        for width in self.out_features:
            starts.append(starts[-1] + width)
        return tuple(starts)

    @cached_property
    def packed(self) -> array[int]:
        """The number of sites, the columns of heads (zeros: none), the sites and out_starts as the C++ operators read
        them."""
        heads = (0, 0, 0) if self.heads is None else (self.heads.first, self.heads.step, self.heads.row)
        return array("q", (len(self.sites), *heads, *self.sites, *self.out_starts))


@dataclass(frozen=True, eq=False)
class PendingExpand:
    """The arguments of a `lora_expand` that is left to the operator that reads `y` next."""

    v: torch.Tensor
    pool: torch.Tensor
    table: LoraTable
    group: LoraGroup
    """A group of linears, not of heads."""
    segments: Segments
    y: torch.Tensor


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows that a mixture's experts compute: (token, choice) pairs, by expert and within an expert by token."""

    tokens: torch.Tensor
    """int64[T * k]: each row's token."""
    experts: torch.Tensor
    """int64[T * k]: each row's expert."""
    places: torch.Tensor
    """int64[T, k]: the row of each choice."""
    starts: torch.Tensor
    """int64[experts + 1]: each expert's first row. Rows from the last on belong to tokens that pad the step."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square normalisation's parameters."""

    weight: torch.Tensor
    """float32[width], contiguous; if a model stores the weight minus one, the one is already added."""
    eps: float
    rounds_first: bool
    """True if the normalised values are rounded to the input's dtype before the product with the weight."""

    @cached_property
    def abi(self) -> NormAbi:
        """Address of the weight and the numbers, as the C++ operators read them."""
        assert self.weight.dtype == torch.float32, "multiplied in float32"
        return NormAbi(self.weight.data_ptr(), self.eps, self.rounds_first)


NO_VECTORS = -1
"""An offset that means that the pool has no vector."""


@dataclass(frozen=True, eq=False)
class OwnWeights:
    """Adapters' own weights of a norm. Each replaces the norm's weight for the rows of its adapter's segment."""

    pool: torch.Tensor
    offsets: torch.Tensor
    """int64[num_slots, norms]: the place in the pool of a slot's weight `[width]` of a norm, or NO_VECTORS."""
    norm: int
    """Column of the norm."""
    segments: Segments
    """Segments of the step's rows."""
    added: float = 0.0
    """A number to add to the pool's values: 1 if a model stores its weight minus one."""
    vectors: int = 1
    """Rows of the norm's input for each row of the step: its heads, one after the other."""

    def spans(self, width: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each weight, float32`[width]`, and the rows of the norm's input that it multiplies. Reads the
        offsets."""
        starts = self.offsets[list(self.segments.slots), self.norm].tolist()
        for start, (_, first, last) in zip(starts, self.segments.spans, strict=True):
            if start != NO_VECTORS:
                weight = self.pool[start : start + width].float() + self.added
                yield weight, slice(first * self.vectors, last * self.vectors)

    def of_rows(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """Return `[rows, width]`: the weight of each of the step's rows, which is the norm's `weight` if a row has no
        other weight.
        """
        slots = self.segments.row_slots(weight.device)
        starts = torch.where(slots < 0, NO_VECTORS, self.offsets[slots.clamp(min=0), self.norm])[:, None]
        columns = torch.arange(len(weight), device=weight.device)
        own = torch.where(starts < 0, weight, self.pool[starts.clamp(min=0) + columns])
        return torch.cat((own, weight.expand(rows - len(own), -1)))


@dataclass(frozen=True, eq=False)
class Rotation:
    """Factors by which the first R elements of every head turn; the other elements stay."""

    cos: torch.Tensor
    """[T, R], float32 or of the queries' dtype, contiguous. Element d turns with element d + R / 2."""
    sin: torch.Tensor
    """[T, R]"""


@dataclass(frozen=True, eq=False)
class KvLayer:
    """One layer's keys and values: strided views into the pool, in which a page holds `block_size` tokens.

    Keys and values have the model's dtype, or are bytes in FP8 (see `e4m3`), with a scale for each page and head.
    """

    key: torch.Tensor
    """[num_pages, num_kv_heads, block_size, head_dim_k]"""
    value: torch.Tensor
    """[num_pages, num_kv_heads, block_size, head_dim_v]"""
    key_scale: torch.Tensor | None = None
    """float32[num_pages, num_kv_heads]; None if the keys have the model's dtype."""
    value_scale: torch.Tensor | None = None
    """float32[num_pages, num_kv_heads]; set if and only if key_scale is."""
    is_read_only: bool = field(default=False, kw_only=True)
    """True if another layer writes these keys and values."""
    has_values_in_keys: bool = field(default=False, kw_only=True)
    """True if `value` is a view of the first elements of `key`, with the same scales, and is never written itself."""

    def __post_init__(self) -> None:
        if self.has_values_in_keys:
            assert self.value.shape[3] <= self.key.shape[3], "a value is the first elements of its key"
            assert self.value.stride() == self.key.stride(), "values are a view of keys"
            assert self.value_scale is self.key_scale, "a page's keys and values have the same scales"
        is_fp8 = self.key.dtype == torch.uint8
        held = (self.key_scale is not None, self.value_scale is not None, self.value.dtype == torch.uint8)
        assert held == (is_fp8,) * 3, "bytes have scales, and nothing else has"

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[2]

    @cached_property
    def abi(self) -> KvLayerAbi:
        """Addresses and strides for the C++ operators."""
        key, value = self.key, self.value
        assert key.stride(3) == value.stride(3) == 1, "a token's row is contiguous"
        scales = [scale for scale in (self.key_scale, self.value_scale) if scale is not None]
        assert all(scale.stride(1) == 1 for scale in scales), "a page's scales are contiguous"
        return KvLayerAbi(
            key.data_ptr(), value.data_ptr(),
            *([scale.data_ptr() for scale in scales] or [0, 0]),
            *key.stride()[:3], *value.stride()[:3],
            *([scale.stride(0) for scale in scales] or [0, 0]),
            self.block_size, key.shape[1], key.shape[3], value.shape[3],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's sequences: the query rows of each, and the pages that hold its context."""

    cu_seqlens: torch.Tensor
    """int32[S + 1]; query rows of sequence s are cu_seqlens[s]:cu_seqlens[s + 1]."""
    context_lens: torch.Tensor
    """int32[S]; tokens of context after this step, its query rows included."""
    block_table: torch.Tensor
    """int32[S, max_blocks]; entries past a sequence's last page are never read."""
    slot_mapping: torch.Tensor
    """int64[T]; page * block_size + offset of each new token."""
    state_tables: torch.Tensor | None = None
    """int32[S, state pages]: the pages of each sequence's states of fixed size; None if the model has none."""
    prompt_lens: torch.Tensor | None = None
    """int32[S], on the host: tokens of each sequence's prompt; None: every row is one of a prompt."""
    table_rows: torch.Tensor | None = None
    """int64[S], on the host: the row of each sequence in both tables on a GPU. None: sequence s has row s."""
    is_invariant: bool = False
    """True if a row's result on a GPU must not depend on the other rows."""
    row_ends: torch.Tensor | None = None
    """int32[T]: one past the last position that each row sees, at least the position after its own and at most the
    sequence's context length. None: each row sees up to itself."""
    key_ranges: torch.Tensor | None = None
    """int32[S, 2], on the host: the first position of each sequence that its rows may see, and one past the last. Each
    row sees a position of its range, or the range is empty. None: all positions."""
    activations: torch.Tensor | None = None
    """int32[S], on the host: leading positions of each sequence whose compressed KV is expanded without the adapter of
    its rows. None: of no sequence."""
    draft_lens: torch.Tensor | None = None
    """int32[S], on the host: last rows of each sequence that may be refused (drafts). Layers with states store the
    states before them. None: of no sequence."""

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(first query row, one past the last, context length) of each sequence, on the host."""
        rows = self.cu_seqlens.tolist()
        return tuple(zip(rows, rows[1:], self.context_lens.tolist(), strict=False))

    @cached_property
    def stored_spans(self) -> tuple[tuple[int, int, int], ...]:
        """`spans` without drafts: the rows after which states are stored."""
        if self.draft_lens is None:
            return self.spans
        found = zip(self.spans, self.draft_lens.tolist(), strict=True)
        return tuple((start, stop - drafts, context - drafts) for (start, stop, context), drafts in found)

    @cached_property
    def prompt_ends(self) -> list[int]:
        """The end of each sequence's prompt among the step's rows; see the function of this name."""
        if self.prompt_lens is None:
            return [stop for _, stop, _ in self.spans]
        return prompt_ends(self.spans, self.prompt_lens.tolist())

    def new_output(self, query: torch.Tensor, layer: KvLayer, lse: torch.Tensor | None) -> torch.Tensor:
        """Return memory for a result of `paged_attention`; with `key_ranges` it and `lse` hold that of empty ranges."""
        shape = (query.shape[0], query.shape[1], layer.value.shape[3])
        if self.key_ranges is None:
            return query.new_empty(shape)
        if lse is not None:
            lse.fill_(float("-inf"))
        return query.new_zeros(shape)

    @cached_property
    def parts(self) -> tuple[AttentionBatch, AttentionBatch]:
        """This batch twice: over the positions before each sequence's activation, and over all others."""
        assert self.activations is not None, "otherwise a batch has one part"
        starts, ends = torch.zeros_like(self.activations), self.context_lens
        ranges = (starts, self.activations), (self.activations, ends)
        earlier, later = (replace(self, key_ranges=torch.stack(pair, dim=1), activations=None) for pair in ranges)
        return earlier, later

    def among(self, sequences: list[int]) -> AttentionBatch:
        """Return the batch of some sequences, ascending, which has their rows alone."""
        index = torch.tensor(sequences)
        lengths = self.cu_seqlens.diff()[index]
        return AttentionBatch(
            cu_seqlens=functional.pad(lengths.cumsum(0), (1, 0)).int(),
            context_lens=self.context_lens[index],
            block_table=self.block_table[index],
            slot_mapping=self.slot_mapping[self.rows_of(sequences)],
            activations=None if self.activations is None else self.activations[index],
        )

    def rows_of(self, sequences: list[int]) -> torch.Tensor:
        """Return int64[n], ascending: the query rows of `sequences`."""
        return torch.cat([torch.arange(*self.spans[sequence][:2]) for sequence in sequences])

    @cached_property
    def decoding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows int64[n] of the sequences that decode one token, before its drafts, and their state tables; None if
        there are none."""
        spans = enumerate(self.stored_spans)
        found = [(i, start) for i, (start, stop, context) in spans if stop - start == 1 < context]
        if not found or self.state_tables is None:
            return None
        sequences, rows = torch.tensor(found, device=self.state_tables.device).T
        return rows, self.state_tables[sequences]

    @cached_property
    def drafts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The first draft of each sequence that has one, then the second, and so on: rows int64[n] and sequences
        int64[n], ascending."""
        spans = list(zip(self.stored_spans, self.spans, strict=True))
        most = max(end - first for (_, first, _), (_, end, _) in spans)
        found = []
        for number in range(most):
            own = [(first + number, i) for i, ((_, first, _), (_, end, _)) in enumerate(spans) if first + number < end]
            rows, sequences = torch.tensor(own).T.contiguous()
            found.append((rows, sequences))
        return found

    @cached_property
    def decoding_prompts(self) -> torch.Tensor:
        """int64[n], on the host: 1 for each sequence of `decoding` whose row is one of its prompt."""
        rows = zip(self.stored_spans, self.prompt_ends, strict=True)
        return torch.tensor([int(start < end) for (start, stop, n), end in rows if stop - start == 1 < n])

    @cached_property
    def causal(self) -> AttentionBatch:
        """This step for layers in which each row sees up to itself. Both have the same plans of attention."""
        causal = replace(self, row_ends=None)
        vars(causal)["attention_plans"] = vars(self).setdefault("attention_plans", {})
        return causal

    @cached_property
    def abi(self) -> AttentionBatchAbi:
        """Addresses of the tensors for the C++ operators."""
        tensors = (self.cu_seqlens, self.context_lens, self.block_table)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors), "tables are contiguous and int32"
        optional = (self.row_ends, self.key_ranges)
        assert all(t is None or (t.dtype == torch.int32 and t.is_contiguous()) for t in optional), "as the tables"
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (*tensors, *optional))
        return AttentionBatchAbi(*addresses, *self.block_table.shape)


def prompt_ends(spans: Iterable[tuple[int, int, int]], prompt_lens: Iterable[int]) -> list[int]:
    """Return one past the last row of each sequence's prompt; its first row or an earlier one if it has none in the
    step. Spans are those of `AttentionBatch`."""
    return [stop - max(0, context - length) for (_, stop, context), length in zip(spans, prompt_lens, strict=True)]


STATE_DTYPE = torch.float32
"""Dtype of states, for every dtype of the model, because states are sums over all tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state of one sequence: a matrix for each head, and the last inputs of a convolution."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    """Channels of the convolution."""
    taps: int
    """Earlier inputs that the convolution reads."""

    @property
    def unit(self) -> int:
        """Elements of one head's matrix."""
        return self.key_dim * self.value_dim

    @property
    def units(self) -> int:
        """Units of the matrices and, after them, of the convolution's inputs."""
        return self.heads + -(-self.channels * self.taps // self.unit)


@dataclass(frozen=True, eq=False)
class StateLayer:
    """One layer's states in the pool.

    Unit n of a sequence is unit n % units_per_page of its state page n // units_per_page. The layer's first units hold
    a head's matrix `[Dk, Dv]` each; the others hold the inputs `[channels, taps]`, oldest first, without a gap.
    """

    shape: StateShape
    units: torch.Tensor
    """float32[num_pages, units_per_page, unit], a strided view of the pool."""
    first: int
    """Number of the layer's first unit."""

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64[units] twice: each unit's page among a sequence's state pages, and its place there."""
        numbers = torch.arange(self.first, self.first + self.shape.units, device=self.units.device)
        return numbers // self.units.shape[1], numbers % self.units.shape[1]

    def copy_of(self, tables: torch.Tensor) -> StateLayer:
        """Return a copy of the states of n sequences, in which sequence i has the page i alone."""
        pages, places = self._places
        return StateLayer(self.shape, self.units[tables[:, pages], places], 0)

    def read(self, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the matrices `[n, heads, Dk, Dv]` and the inputs `[n, channels, taps]` of n sequences."""
        shape, (pages, places) = self.shape, self._places
        found = self.units[tables[:, pages], places]
        matrices = found[:, : shape.heads, : shape.unit].unflatten(2, (shape.key_dim, shape.value_dim))
        inputs = found[:, shape.heads :].flatten(1)[:, : shape.channels * shape.taps]
        return matrices, inputs.unflatten(1, (shape.channels, shape.taps))

    def write(self, tables: torch.Tensor, matrices: torch.Tensor, inputs: torch.Tensor) -> None:
        """Store matrices and inputs as `read` returns them."""
        shape, (pages, places), unit = self.shape, self._places, self.units.shape[2]
        rest = (shape.units - shape.heads) * unit - shape.channels * shape.taps
        tail = functional.pad(inputs.flatten(1).to(STATE_DTYPE), (0, rest)).unflatten(1, (-1, unit))
        heads = functional.pad(matrices.flatten(2), (0, unit - shape.unit))
        self.units[tables[:, pages], places] = torch.cat((heads, tail), dim=1)


@dataclass(frozen=True, eq=False)
class StateRows:
    """A step's rows as the linears of a layer with states leave them: views, whose last dimension is contiguous.

    R heads of values share a head of queries and keys. Mamba 2 calls these heads groups, queries C, keys B, values x.
    """

    query: torch.Tensor
    """[T, key heads, Dk]"""
    key: torch.Tensor
    """[T, key heads, Dk]"""
    value: torch.Tensor
    """[T, key heads, R, Dv]"""
    b: torch.Tensor | None
    """[T, key heads, R]: the step size of the gated delta rule is its sigmoid; None: the rule is Mamba 2's, whose step
    size is the softplus of `a`."""
    a: torch.Tensor
    """[T, key heads, R]: the state decays by its softplus."""


NO_LIMITS = (0.0, float("inf"))
"""Limits of step sizes that change nothing."""


@dataclass(frozen=True, eq=False)
class StateWeights:
    """The weights of a layer with states, except its linears and its norm."""

    kernel: torch.Tensor
    """[channels, taps + 1], contiguous: channels of all query heads, of all key heads, then of all value heads."""
    decay: torch.Tensor
    """float32[heads], below 0: factor of the softplus."""
    shift: torch.Tensor
    """[heads]: added to `a`."""
    bias: torch.Tensor | None = None
    """[channels]: added to the convolution's sums."""
    skip: torch.Tensor | None = None
    """float32[heads]: factor with which a head's value is added to its result."""
    delta_factor: float = 1.0
    """Factor of the gated delta rule's step sizes."""
    limits: tuple[float, float] = NO_LIMITS
    """Least and largest step size of Mamba 2 in the rows of a prompt. Generated tokens have no limits: see `mamba2`."""

    @cached_property
    def in_float32(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The kernel `[taps + 1, channels]`, the bias and the shift as the C++ operator reads them: contiguous."""
        bias = None if self.bias is None else self.bias.float()
        return self.kernel.float().T.contiguous(), bias, self.shift.float()

    @property
    def is_limited(self) -> bool:
        """True if the limits may change a step size, which is above 0."""
        return self.limits[0] > 0.0 or self.limits[1] < NO_LIMITS[1]


NO_TOKEN = -2
"""Result for a row that has no token to choose. No token has this id."""

IN_PROMPT = 1 << 30
"""Bit of a token's count that says that the prompt has the token; the lower bits count how often it was generated."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """Counts of the tokens that sequences have read and generated, and the penalties on them; S rows of logits."""

    counts: torch.Tensor
    """int32[sequences, at least vocab]: the number of times that a sequence generated a token, with IN_PROMPT."""
    counters: torch.Tensor
    """int32[S]: each row's row of `counts`; -1 for a row without penalties."""
    repetition: torch.Tensor
    """float32[S]; 1 for no penalty. Logits of seen tokens are divided by it if they are above 0, and otherwise
    multiplied (Keskar et al., 2019).
    """
    presence: torch.Tensor
    """float32[S]; 0 for no penalty. The penalty is subtracted from the logits of generated tokens."""
    frequency: torch.Tensor
    """float32[S]; 0 for no penalty. The penalty is subtracted from a generated token's logit, once for each time it was
    generated.
    """
    drafts: torch.Tensor | None = None
    """int32[S, D]: drafted tokens that a row follows in addition, filled up with -1. They count as generated."""


@dataclass(frozen=True, eq=False)
class LogitBias:
    """Terms added to single logits (-inf forbids a token); no (row, token) pair twice."""

    rows: torch.Tensor
    """int32[M]"""
    token_ids: torch.Tensor
    """int32[M]; tokens outside the vocabulary are left out."""
    values: torch.Tensor
    """float32[M]"""
    number: torch.Tensor
    """int32[1]: the number of terms. Those after them have no meaning."""


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling parameters; each tensor has one number per row of logits.

    A CUDA graph holds the tensors' addresses and their largest number of rows. So the number of rows is data too, and
    penalties and bias are there for rows that do not ask for them.
    """

    num_rows: torch.Tensor
    """int32[1]: rows that a token is chosen for. The numbers of the rows after them have no meaning."""
    is_steered: torch.Tensor
    """int32[S]; 0 if neither penalties nor bias change the row's logits."""
    temperature: torch.Tensor
    """float32[S]; 0 takes the most likely token, among equal tokens the first."""
    top_k: torch.Tensor
    """int32[S]; 0 keeps all. Equals of the k-th stay."""
    top_p: torch.Tensor
    """float32[S]; 1 keeps all tokens. A token is kept if the tokens strictly above it have less than this share. The
    best token is always kept.
    """
    min_p: torch.Tensor
    """float32[S]; 0 keeps all. Relative to the most likely token."""
    seed: torch.Tensor
    """int64[S]: the seed of each request."""
    step: torch.Tensor
    """int32[S]: number of tokens that the request has generated. A (seed, step) pair always draws the same numbers."""
    penalties: Penalties | None = None
    """None if no row is steered."""
    bias: LogitBias | None = None
