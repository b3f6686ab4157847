"""MiSS, C3A and GraLoRA: the weight is changed in blocks.

Sources: https://arxiv.org/abs/2409.15371, https://arxiv.org/abs/2407.19342, https://arxiv.org/abs/2505.20355, and their
layers in PEFT.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import Alpha, Rank
from loramux_adapters.convert.kind import ConvertibleKind, Factors, Pair, Ranks, Tensors
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


class Miss(ConvertibleKind, frozen=True, kw_only=True):
    """`y += S(x) M`, where S sums every r-th input: A says which inputs, B is M transposed."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("miss_dropout",))

    r: Rank
    mini_r: Rank = 1
    init_weights: bool | str | None = True

    def __post_init__(self) -> None:
        if self.init_weights not in (True, False, None, "mini"):
            raise ConfigRejected(
                "field_unsupported",
                "init_weights",
                f"init_weights is {str(self.init_weights)[:40]!r}. MiSS in its 'bat' form multiplies the base's own "
                "weights, which no LoRA expresses without them. Train it with init_weights=true.",
            )

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        out_features, in_features = linear.out_features, linear.in_features
        width = self.mini_r if self.init_weights == "mini" else out_features
        if out_features % width or self.r > in_features:
            field = "mini_r" if out_features % width else "r"
            raise ConfigRejected("config_invalid", field, f"{field} does not fit {match.module}, {_sides(linear)}.")

        def pair(tensors: Tensors) -> Pair:
            block = tensors["miss_block"]
            chosen = torch.arange(in_features) % self.r
            a = torch.zeros(self.r, in_features, dtype=block.dtype)
            a[chosen, torch.arange(in_features)] = 1
            return a, block.repeat(1, out_features // width).T

        return Factors({"miss_block": (self.r, width)}, self.r, pair)


class C3a(ConvertibleKind, frozen=True, kw_only=True):
    """Blocks of circulant matrices, each given by one vector: full rank, so that the pair is the matrix itself."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("init_weights",))

    block_size: Rank
    block_size_pattern: Ranks = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.block_size_pattern:
            # C3A has its own rule for these keys; for plain names it equals the common one.
            if not _PLAIN.fullmatch(key):
                raise ConfigRejected(
                    "field_unsupported",
                    "block_size_pattern",
                    f"block_size_pattern has the key {key[:120]!r}; use names of modules, not expressions.",
                )

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.block_size_pattern)

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        size = self.block_size_pattern.get(match.rank_key, self.block_size)
        if linear.in_features % size or linear.out_features % size:
            raise ConfigRejected(
                "config_invalid", "block_size", f"block_size {size} does not divide {match.module}, {_sides(linear)}."
            )
        rows, columns = linear.out_features // size, linear.in_features // size

        def pair(tensors: Tensors) -> Pair:
            lanes = torch.arange(size)
            # Row j, column k of a block is element (k - j) mod n of its kernel.
            circulant = tensors["c3a_kernel"][:, :, (lanes[None, :] - lanes[:, None]) % size]
            delta = circulant.permute(0, 2, 1, 3).reshape(linear.out_features, linear.in_features)
            return torch.eye(linear.in_features, dtype=delta.dtype), delta / linear.in_features

        return Factors({"c3a_kernel": (rows, columns, size)}, linear.in_features, pair)


class GraLora(ConvertibleKind, frozen=True, kw_only=True):
    """A LoRA of rank r/k for each of the k x k blocks of the weight, and one of rank hybrid_r for the whole weight."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("gralora_dropout", "fan_in_fan_out", "init_weights"))

    r: Rank
    alpha: Alpha
    gralora_k: Rank = 2
    hybrid_r: Annotated[int, Meta(ge=0, le=65_536)] = 0

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        k, r = self.gralora_k, self.r
        if r % k or linear.in_features % k or linear.out_features % k:
            raise ConfigRejected(
                "config_invalid",
                "gralora_k",
                f"gralora_k {k} does not divide r {r} or {match.module}, {_sides(linear)}.",
            )
        scale = self.alpha / (r + self.hybrid_r)
        shapes: dict[str, tuple[int, ...]] = {
            "gralora_A": (k, linear.in_features // k, r),
            "gralora_B": (k, r, linear.out_features // k),
        }
        if self.hybrid_r:
            shapes["gralora_A_general.weight"] = (self.hybrid_r, linear.in_features)
            shapes["gralora_B_general.weight"] = (linear.out_features, self.hybrid_r)

        def pair(tensors: Tensors) -> Pair:
            a, b = _blocks(tensors["gralora_A"], tensors["gralora_B"])
            if self.hybrid_r:
                a = torch.cat((a, tensors["gralora_A_general.weight"]))
                b = torch.cat((b, tensors["gralora_B_general.weight"]), dim=1)
            return a, scale * b

        return Factors(shapes, k * r + self.hybrid_r, pair)


def _blocks(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """Join A `[k, in/k, r]` and B `[k, r, out/k]` to one pair of rank k * r: (input block, output block, s).

    Of input block n, ranks `[j * s, (j + 1) * s)` go to output block j, which takes them as its n-th s.
    """
    k, in_block, r = a.shape
    out_block, s = b.shape[2], r // k
    whole_a = torch.zeros(k, k, s, k, in_block, dtype=a.dtype)
    whole_b = torch.zeros(k, out_block, k, k, s, dtype=b.dtype)
    for n in range(k):
        whole_a[n, :, :, n] = a[n].view(in_block, k, s).permute(1, 2, 0)
        whole_b[n, :, :, n] = b[n].view(k, s, out_block).permute(2, 0, 1)
    return whole_a.view(k * r, k * in_block), whole_b.view(k * out_block, k * r)


def _sides(linear: LinearShape) -> str:
    return f"which has {linear.in_features} inputs and {linear.out_features} outputs"
