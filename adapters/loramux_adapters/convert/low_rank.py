"""LoHa, LoKr, AdaLoRA and DeLoRA: products of small matrices that belong to one linear each.

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
from loramux_adapters.convert.kind import ConvertibleKind, Factors, Pair, Ranks, Shape, Tensors
from loramux_adapters.matching import Match

_NORM_FLOOR = 1e-4
"""Least norm that DeLoRA divides by."""
_RANK_GUARD = 1e-5
"""AdaLoRA: PEFT adds it to the rank that it divides by."""


class _Lycoris(ConvertibleKind, frozen=True, kw_only=True):
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
    """Factor a dimension as PEFT does: `factor` itself if it divides, else the largest divisor up to it."""
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
    """Return left and right factors of one of the two matrices, as thin as possible."""
    if name in tensors:
        whole = tensors[name]
    else:
        left, right = tensors[f"{name}_a"], tensors[f"{name}_b"]
        if left.shape[1] <= min(left.shape[0], right.shape[1]):
            return left, right
        whole = left @ right
    eye = torch.eye(min(whole.shape), dtype=whole.dtype)
    return (whole, eye) if whole.shape[1] <= whole.shape[0] else (eye, whole)


class AdaLora(ConvertibleKind, frozen=True, kw_only=True):
    """`dW = scale * B diag(E) A`; rank_pattern selects the kept ranks, and the scale is that of all ranks."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        (
            "r",  # AdaLoRA reads init_r instead
            "target_r",
            "tinit",
            "tfinal",
            "deltaT",
            "beta1",
            "beta2",
            "orth_reg_weight",
            "total_step",
            "lora_dropout",
            "fan_in_fan_out",
            "init_lora_weights",
            "use_rslora",  # AdaLoRA has its own scale
            "megatron_core",
            "qalora_group_size",
            "ensure_weight_tying",
            "runtime_config",
        )
    )

    init_r: Rank
    lora_alpha: Alpha
    rank_pattern: Annotated[
        dict[Name, Annotated[tuple[bool, ...], Meta(min_length=1, max_length=65_536)]], Meta(max_length=10_000)
    ] = msgspec.field(default_factory=dict)

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        kept = self.rank_pattern.get(f"{match.module}.lora_E")
        rank = self.init_r if kept is None else sum(kept)
        scale = (self.lora_alpha if self.lora_alpha > 0 else rank) / (self.init_r + _RANK_GUARD)
        shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank), "lora_E": (rank, 1)}

        def pair(tensors: Tensors) -> Pair:
            return tensors["lora_A"] * tensors["lora_E"], scale * tensors["lora_B"]

        return Factors(shapes, rank, pair)


class DeLora(ConvertibleKind, frozen=True, kw_only=True):
    """`dW = B diag(lambda / (r |a_i| |b_i|)) A diag(w_norm)`; the file holds the base's w_norm."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("module_dropout", "init_weights", "delora_lambda", "lambda_pattern")  # trained, and then in the file
    )

    r: Rank
    rank_pattern: Ranks = msgspec.field(default_factory=dict)

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.rank_pattern)

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        rank = self.rank_pattern.get(match.rank_key, self.r)
        shapes = {
            "delora_A": (rank, linear.in_features),
            "delora_B": (linear.out_features, rank),
            "delora_lambda": (1,),
            "delora_w_norm": (linear.in_features,),
        }

        def pair(tensors: Tensors) -> Pair:
            a, b = tensors["delora_A"], tensors["delora_B"]
            norms = a.norm(dim=1).clamp(min=_NORM_FLOOR) * b.norm(dim=0).clamp(min=_NORM_FLOOR)
            return a * tensors["delora_w_norm"], b * (tensors["delora_lambda"] / rank / norms)

        return Factors(shapes, rank, pair)
