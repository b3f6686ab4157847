"""Random inputs of the operators between a layer's linears, on ragged shapes: norms, rotations, gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from loramux_kernels.tables import KvLayer, Norm, Rotation


def random_norm(width: int, rounds_first: bool) -> Norm:
    return Norm(1.0 + 0.3 * torch.randn(width), 1e-5, rounds_first)


@dataclass(frozen=True)
class NormCase:
    """`x` and `delta` are slices of wider rows."""

    x: torch.Tensor
    delta: torch.Tensor | None
    factor: float
    norm: Norm


@st.composite
def norm_cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> NormCase:
    torch.manual_seed(draw(st.integers(0, 9)))
    rows, width = draw(st.integers(0, 9)), draw(st.integers(1, 200))
    dtype = draw(st.sampled_from(dtypes))
    x, delta = (torch.randn(rows, width + 3).to(dtype)[:, 1 : 1 + width] * 2 for _ in range(2))
    adds = draw(st.booleans())
    factor = draw(st.sampled_from((1.0, 0.22)))
    return NormCase(x, delta if adds else None, factor, random_norm(width, draw(st.booleans())))


@dataclass(frozen=True)
class RopeCase:
    """Queries, keys and values as slices of one joined output; the pages are poisoned."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotation: Rotation | None
    layer: KvLayer
    slot_mapping: torch.Tensor
    query_norm: Norm | None
    key_norm: Norm | None

    def copy(self) -> RopeCase:
        """Return a copy with its own tensors."""
        tensors = {name: getattr(self, name).clone() for name in ("query", "key", "value")}
        return replace(self, **tensors, layer=KvLayer(self.layer.key.clone(), self.layer.value.clone()))

    @property
    def arguments(self) -> tuple[object, ...]:
        return (
            *(self.query, self.key, self.value, self.rotation, self.layer, self.slot_mapping),
            *(self.query_norm, self.key_norm),
        )


@st.composite
def rope_cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> RopeCase:
    torch.manual_seed(draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from(dtypes))
    tokens, kv_heads, group = draw(st.integers(0, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    half, rest, value_dim = draw(st.integers(1, 40)), draw(st.sampled_from((0, 0, 2, 19))), draw(st.integers(1, 70))
    key_dim, heads, block = 2 * half + rest, kv_heads * group, 4
    widths = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
    parts = torch.randn(tokens, sum(widths)).to(dtype).split(widths, dim=-1)
    query, key, value = (
        part.unflatten(1, (-1, dim)) for part, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True)
    )
    rotated = draw(st.sampled_from((None, dtype, torch.float32)))
    angles = torch.rand(tokens, half).repeat(1, 2) * 6
    norms = [random_norm(key_dim, rounds_first=True) for _ in range(2)] if draw(st.booleans()) else [None, None]
    return RopeCase(
        query,
        key,
        value,
        None if rotated is None else Rotation(angles.cos().to(rotated), angles.sin().to(rotated)),
        KvLayer(*(torch.full((3, kv_heads, block, dim), float("nan"), dtype=dtype) for dim in (key_dim, value_dim))),
        torch.randperm(3 * block)[:tokens],
        *norms,
    )


@dataclass(frozen=True)
class GateCase:
    """`gate` and `up` are slices of one joined output."""

    gate: torch.Tensor
    up: torch.Tensor


@st.composite
def gate_cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> GateCase:
    torch.manual_seed(draw(st.integers(0, 9)))
    rows, width = draw(st.integers(0, 9)), draw(st.integers(1, 200))
    joined = (torch.randn(rows, 2 * width) * 4).to(draw(st.sampled_from(dtypes)))
    return GateCase(*joined.chunk(2, dim=-1))
