"""Steps of layers with states: sequences of any lengths, their states in a pool, and rows as the linears leave them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from loramux_kernels.tables import AttentionBatch, StateLayer, StateRows, StateShape, StateWeights

TAPS = 3


@dataclass(frozen=True)
class Sizes:
    """Heads of keys and of values, and their widths."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def shape(self) -> StateShape:
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        return StateShape(self.heads, self.key_dim, self.value_dim, channels, TAPS)


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of the operator."""

    rows: StateRows
    gate: torch.Tensor
    weights: StateWeights
    state: StateLayer
    batch: AttentionBatch

    @property
    def arguments(self) -> tuple[StateRows, StateWeights, StateLayer, AttentionBatch]:
        return self.rows, self.weights, self.state, self.batch

    def with_copied_pool(self) -> Case:
        """Return the same case whose pool is another copy, with other strides if the copy is dense."""
        return replace(self, state=replace(self.state, units=self.state.units.clone()))


def make_linear_case(
    sizes: Sizes,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    by_key_head: bool = False,
    padding: int = 0,
    seed: int = 0,
    is_mamba: bool = False,
) -> Case:
    """Make a step of sequences of `spans`: rows of the step, and tokens before them.

    Pages that hold no state are NaN, and so are the states of sequences that begin. With `by_key_head` the parts of one
    key head are next to each other in a row (Qwen3-Next), else those of one kind are (Qwen3.5). With `is_mamba` the
    rule is Mamba 2's, with a bias, a skip and limits; every third sequence has generated some of its tokens.
    """
    torch.manual_seed(seed)
    shape, repeats = sizes.shape, sizes.heads // sizes.key_heads
    lengths, earlier = (torch.tensor(part, dtype=torch.int32) for part in zip(*spans, strict=True))
    count = int(lengths.sum())
    widths = [sizes.key_dim, sizes.key_dim, repeats * sizes.value_dim, repeats * sizes.value_dim, repeats, repeats]
    joined = torch.randn(count + padding, sizes.key_heads * sum(widths), device=device).to(dtype)
    joined[count:] = float("nan")
    if by_key_head:
        parts = joined.unflatten(1, (sizes.key_heads, -1)).split(widths, dim=-1)
    else:
        whole = joined.split([sizes.key_heads * width for width in widths], dim=-1)
        parts = tuple(part.unflatten(1, (sizes.key_heads, -1)) for part in whole)
    query, key, value, gate, b, a = parts
    value, gate = (part.unflatten(2, (repeats, sizes.value_dim)) for part in (value, gate))
    weights = StateWeights(
        torch.randn(shape.channels, TAPS + 1, device=device).to(dtype) * 0.5,
        -torch.linspace(0.05, 8.0, sizes.heads, device=device),
        torch.randn(sizes.heads, device=device).to(dtype),
    )
    if is_mamba:
        weights = replace(
            weights,
            kernel=weights.kernel * 0.3,  # nothing is normalised: larger results would hide small differences
            bias=torch.randn(shape.channels, device=device).to(dtype) * 0.3,
            skip=torch.randn(sizes.heads, device=device),
            limits=(0.4, 1.0),
        )
    per_page, first = 3, 2  # another layer's units come first
    pages = -(-(first + shape.units) // per_page)
    num_pages = len(spans) * pages + 2
    pool = torch.full((num_pages, per_page * shape.unit + 16), float("nan"), device=device)
    state = StateLayer(shape, pool.as_strided((num_pages, per_page, shape.unit), (len(pool[0]), shape.unit, 1)), first)
    held = torch.zeros(len(spans), pages + 4, dtype=torch.int32)  # a step's tables have those of KV too
    held[:, :pages] = torch.randperm(num_pages)[: len(spans) * pages].view(len(spans), pages)
    tables = held.to(device)[:, :pages]
    running = [i for i, (_, before) in enumerate(spans) if before]
    if running:
        matrices = torch.randn(len(running), shape.heads, shape.key_dim, shape.value_dim, device=device)
        inputs = torch.randn(len(running), shape.channels, TAPS, device=device).to(dtype)
        state.write(tables[running], matrices, inputs)
    ends = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    nothing = torch.zeros(0, dtype=torch.int64)
    contexts = lengths + earlier
    prompts = torch.tensor([max(1, n - 2) if i % 3 == 0 else n for i, n in enumerate(contexts.tolist())])
    batch = AttentionBatch(ends, contexts, tables[:, :0], nothing, tables, prompts)
    return Case(StateRows(query, key, value, None if is_mamba else b, a), gate, weights, state, batch)
