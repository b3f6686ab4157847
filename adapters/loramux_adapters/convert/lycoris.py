"""LoHa and LoKr: a Hadamard and a Kronecker product of small matrices.

Sources: FedPara (https://arxiv.org/abs/2108.06098), KronA (https://arxiv.org/abs/2212.10650), and their layers in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import MAX_PATTERNS, Alpha, Name, Rank
from loramux_adapters.convert.form import Factors, Form, Pair, Ranks, Shape, Tensors
from loramux_adapters.matching import Match


class _Lycoris(Form, frozen=True, kw_only=True):
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d")  # there are no convolutions here
    )

    r: Rank
    alpha: Alpha
    rank_pattern: Ranks = msgspec.field(default_factory=dict)
    alpha_pattern: Annotated[dict[Name, Alpha], Meta(max_length=MAX_PATTERNS)] = msgspec.field(default_factory=dict)

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.rank_pattern)

    @property
    @override
    def alpha_keys(self) -> tuple[str, ...]:
        return tuple(self.alpha_pattern)

    def _rank(self, match: Match) -> int:
        return self.rank_pattern.get(match.rank_key, self.r)

    def _scale(self, match: Match) -> float:
        return self.alpha_pattern.get(match.alpha_key, self.alpha) / self._rank(match)


class LoHa(_Lycoris, frozen=True, kw_only=True):
    """`dW = scale * (W1a W1b) o (W2a W2b)`, whose columns are those of the row-wise Khatri-Rao product: rank r^2."""

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        r, scale = self._rank(match), self._scale(match)
        shapes = {
            "hada_w1_a": (linear.out_features, r),
            "hada_w1_b": (r, linear.in_features),
            "hada_w2_a": (linear.out_features, r),
            "hada_w2_b": (r, linear.in_features),
        }

        def pair(tensors: Tensors) -> Pair:
            b = torch.einsum("oi,oj->oij", tensors["hada_w1_a"], tensors["hada_w2_a"]).flatten(1)
            a = torch.einsum("in,jn->ijn", tensors["hada_w1_b"], tensors["hada_w2_b"]).flatten(0, 1)
            return a, scale * b

        return Factors(shapes, r * r, pair)


class LoKr(_Lycoris, frozen=True, kw_only=True):
    """`dW = scale * W1 (x) W2`, and `(L1 R1) (x) (L2 R2) = (L1 (x) L2) (R1 (x) R2)`: the ranks multiply."""

    HARMLESS: ClassVar[frozenset[str]] = _Lycoris.HARMLESS | {"rank_dropout_scale"}

    decompose_both: bool = False
    decompose_factor: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        r, scale = self._rank(match), self._scale(match)
        outer_out, inner_out = factorization(linear.out_features, self.decompose_factor)
        outer_in, inner_in = factorization(linear.in_features, self.decompose_factor)
        split_outer = self.decompose_both and r < max(outer_out, outer_in) / 2
        split_inner = r < max(inner_out, inner_in) / 2
        shapes = _shapes("lokr_w1", outer_out, outer_in, r if split_outer else None)
        shapes |= _shapes("lokr_w2", inner_out, inner_in, r if split_inner else None)

        def pair(tensors: Tensors) -> Pair:
            left_1, right_1 = _split("lokr_w1", tensors)
            left_2, right_2 = _split("lokr_w2", tensors)
            return torch.kron(right_1, right_2), scale * torch.kron(left_1, left_2)

        return Factors(shapes, _rank("lokr_w1", shapes) * _rank("lokr_w2", shapes), pair)


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """PEFT's two factors of a dimension: `factor` itself where it divides, else the largest small divisor up to it."""
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    limit = dimension if factor == -1 else factor
    small = next((m for m in range(min(limit, int(dimension**0.5)), 1, -1) if dimension % m == 0), 1)
    return small, dimension // small


def _shapes(name: str, out_features: int, in_features: int, rank: int | None) -> dict[str, Shape]:
    if rank is None:
        return {name: (out_features, in_features)}
    return {f"{name}_a": (out_features, rank), f"{name}_b": (rank, in_features)}


def _rank(name: str, shapes: Mapping[str, Shape]) -> int:
    return min(shapes[name]) if name in shapes else min(*shapes[f"{name}_a"], *shapes[f"{name}_b"])


def _split(name: str, tensors: Tensors) -> Pair:
    """Left and right factors of one of the two matrices, as thin as its shape says."""
    if name in tensors:
        whole = tensors[name]
    else:
        left, right = tensors[f"{name}_a"], tensors[f"{name}_b"]
        if left.shape[1] <= min(left.shape[0], right.shape[1]):
            return left, right
        whole = left @ right
    eye = torch.eye(min(whole.shape), dtype=whole.dtype)
    return (whole, eye) if whole.shape[1] <= whole.shape[0] else (eye, whole)
