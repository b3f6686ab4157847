"""Random factors and shifts in a poisoned pool, on ragged segments: what `rescale` is tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from loramux_kernels.tables import NO_VECTORS, LoraGroup, Segments


@dataclass(frozen=True)
class RescaleCase:
    """`vectors[slot][i]` is the pair `[2, width]` of the group's i-th site, or None."""

    pool: torch.Tensor
    offsets: torch.Tensor
    group: LoraGroup
    segments: Segments
    vectors: list[list[torch.Tensor | None]]
    y: torch.Tensor

    def to(self, device: torch.device) -> RescaleCase:
        moved = {name: getattr(self, name).to(device) for name in ("pool", "offsets", "y")}
        return replace(self, **moved)


def make_case(
    dtype: torch.dtype, widths: Sequence[int], held: Sequence[Sequence[bool]], rows: Sequence[int], base_rows: int
) -> RescaleCase:
    """Segment k has rows[k] rows of slot k, which holds vectors for the sites of held[k]."""
    torch.manual_seed(len(rows) + sum(widths))
    offsets = torch.full((len(held), len(widths) + 1), NO_VECTORS, dtype=torch.int64)
    pieces, vectors, end = [], [], 0
    for slot, sites in enumerate(held):
        vectors.append([torch.randn(2, w).to(dtype) if h else None for w, h in zip(widths, sites, strict=True)])
        for site, pair in enumerate(vectors[-1]):
            if pair is not None:
                end += 3
                offsets[slot, site + 1] = end
                pieces.append((end, pair))
                end += pair.numel()
    pool = torch.full((end + 8,), float("nan"), dtype=dtype)
    for start, pair in pieces:
        pool[start : start + pair.numel()] = pair.flatten()
    cu_seqlens = (0, *torch.tensor(rows).cumsum(0).tolist())
    y = torch.randn(cu_seqlens[-1] + base_rows, sum(widths)).to(dtype)
    group = LoraGroup(tuple(range(1, len(widths) + 1)), tuple(widths))
    return RescaleCase(pool, offsets, group, Segments(cu_seqlens, tuple(range(len(rows)))), vectors, y)


@st.composite
def rescale_cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> RescaleCase:
    widths = draw(st.lists(st.integers(1, 1100), min_size=1, max_size=3))
    slots = draw(st.integers(1, 3))
    sites = st.lists(st.booleans(), min_size=len(widths), max_size=len(widths))
    held = draw(st.lists(sites, min_size=slots, max_size=slots))
    rows = draw(st.lists(st.integers(0, 5), min_size=slots, max_size=slots))
    return make_case(draw(st.sampled_from(dtypes)), widths, held, rows, draw(st.integers(0, 2)))
