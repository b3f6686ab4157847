"""PiSSA and OLoRA as they are saved: trained factors, and a base from which the first factors B0 A0 were taken away.

PEFT computes B0 A0 again from the base when it loads such an adapter, and takes it away again. On an unchanged base the
weight gains `scale * B A - B0 A0`: a pair of twice the rank. Both products are projections of the weight W, unique
where their factors are not:

- PiSSA (https://arxiv.org/abs/2404.02948): `U U^T W`, U the left singular vectors of the r largest singular values.
- OLoRA (https://arxiv.org/abs/2406.01775): `scale * Q Q^T W`, Q an orthonormal basis of the first r columns of W.

U is computed from the eigenvectors of the smaller of `W W^T` and `W^T W`, in float64: cheaper than decomposing W.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import HARMLESS, MAX_PATTERNS, OTHER_TOOLS, Alpha, Name, Rank
from loramux_adapters.convert.kind import BASE_WEIGHT, ConvertibleKind, Factors, Pair, Ranks, Tensors
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match
from loramux_adapters.unsupported import RESTORE


class _Initialised(ConvertibleKind, frozen=True, kw_only=True):
    """A LoRA whose first factors were taken from the base."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset((*HARMLESS, *OTHER_TOOLS, "init_lora_weights"))
    BASE_FIELD: ClassVar[str] = "init_lora_weights"
    WAY_OUT: ClassVar[str] = RESTORE

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
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

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        rank = self.rank_pattern.get(match.rank_key, self.r)
        alpha = self.alpha_pattern.get(match.alpha_key, self.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        if linear.transposed or rank > min(linear.in_features, linear.out_features) or scale == 0:
            raise ConfigRejected(
                "config_invalid",
                "r",
                f"PEFT cannot start rank {rank} and alpha {alpha} from the weight of {match.module}. {RESTORE}",
            )
        shapes = {"lora_A.weight": (rank, linear.in_features), "lora_B.weight": (linear.out_features, rank)}

        def pair(tensors: Tensors) -> Pair:
            first_a, first_b = self._first(tensors[BASE_WEIGHT], rank, scale)
            a = torch.cat((tensors["lora_A.weight"], first_a))
            return a, torch.cat((scale * tensors["lora_B.weight"], -first_b), dim=1)

        return Factors(shapes, 2 * rank, pair, work=self._work(linear, rank))

    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        """Return the factors of what PEFT takes away from `weight` `[out_features, in_features]`."""
        raise NotImplementedError

    def _work(self, linear: LinearShape, rank: int) -> float:
        """Return about how many multiplications `_first` takes."""
        raise NotImplementedError


class Pissa(_Initialised, frozen=True, kw_only=True):
    """The principal part of the weight is trained."""

    @override
    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        is_wide = weight.shape[0] <= weight.shape[1]
        gram = weight @ weight.T if is_wide else weight.T @ weight
        vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:]
        return (vectors.T @ weight, vectors) if is_wide else (vectors.T, weight @ vectors)

    @override
    def _work(self, linear: LinearShape, rank: int) -> float:
        small, large = sorted((linear.in_features, linear.out_features))
        return float(small**2 * large + 5 * small**3)


class Olora(_Initialised, frozen=True, kw_only=True):
    """An orthonormal basis of the weight's columns is trained."""

    @override
    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        basis = torch.linalg.qr(weight[:, :rank]).Q
        return basis.T @ weight, scale * basis

    @override
    def _work(self, linear: LinearShape, rank: int) -> float:
        return float(linear.in_features * linear.out_features * rank)
