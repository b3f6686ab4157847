"""Protocol of a convertible kind: its tensors for a linear, and the pair that is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import MAX_PATTERNS, Alpha, Name, Rank, Targets
from loramux_adapters.matching import Match

Tensors = Mapping[str, torch.Tensor]
"""float64 tensors by the last parts of their names (`lora_A`); those that all linears share, by their whole names."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A `[rank, in_features]` and B `[out_features, rank]`: the linear's weight gains exactly B @ A."""
Shape = tuple[int, ...]
BASE_WEIGHT = "weight"
"""Name of the linear's own weight `[out_features, in_features]` among the tensors from which a base-dependent pair is
made."""
Ranks = Annotated[dict[Name, Rank], Meta(max_length=MAX_PATTERNS)]


@dataclass(frozen=True, slots=True)
class Factors:
    """One linear's share of an adapter."""

    shapes: Mapping[str, Shape]
    """Shapes of the linear's tensors, by the last parts of their names."""
    rank: int
    """Rank of the pair before folding, from the kind's algebra."""
    pair: Callable[[Tensors], Pair]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may repeat a shared tensor, each with the whole name of the shared tensor that it must equal."""
    work: float = 0
    """Approximate number of multiplications that make the pair from the base's weight; 0 if the weight is not
    needed."""


class ConvertibleKind(Targets, frozen=True, kw_only=True):
    """The fields of an adapter_config.json that decide what a kind computes; PEFT's names and meaning."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """The kind's own fields that have no effect on a trained adapter."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """The kind's own fields that must be off, and the way out if a field is on."""
    TOO_LARGE: ClassVar[str] = (
        "Train a smaller one, or make a LoRA that comes close with peft.save_as_lora(path, model, rank={max_rank}) and "
        "upload that."
    )
    """The way out if the exact LoRA has too large a rank."""
    BASE_FIELD: ClassVar[str] = "peft_type"
    """The field by which the kind computes with the base's weights, if it does."""
    WAY_OUT: ClassVar[str] = ""
    """The way out if the base's weights cannot be used in computations."""

    @property
    def rank_keys(self) -> tuple[str, ...]:
        """Keys of the pattern that changes ranks."""
        return ()

    @property
    def alpha_keys(self) -> tuple[str, ...]:
        """Keys of the pattern that changes scales."""
        return ()

    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:  # noqa: ARG002 - most share nothing
        """Return the shapes of the tensors that the adapted `linears` share, by their whole names."""
        return {}

    def factors(self, match: Match, linear: LinearShape) -> Factors:
        """Describe one linear's tensors and pair. Raises ConfigRejected if the kind does not fit the linear."""
        raise NotImplementedError


class RankPatterned(ConvertibleKind, frozen=True, kw_only=True):
    """A kind whose configuration has ranks for some modules."""

    rank_pattern: Ranks = msgspec.field(default_factory=dict)

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.rank_pattern)


class Patterned(RankPatterned, frozen=True, kw_only=True):
    """A kind whose configuration has ranks and alphas for some modules."""

    alpha_pattern: Annotated[dict[Name, Alpha], Meta(max_length=MAX_PATTERNS)] = msgspec.field(default_factory=dict)

    @property
    @override
    def alpha_keys(self) -> tuple[str, ...]:
        return tuple(self.alpha_pattern)


def folded(pair: Pair) -> Pair:
    """Return the same product at the rank of the smaller side."""
    a, b = pair
    return pair_of_change(b @ a)


def pair_of_change(change: torch.Tensor) -> Pair:
    """Return the pair of a change `[out_features, in_features]` of full rank, at the rank of the smaller side."""
    eye = torch.eye(min(change.shape), dtype=change.dtype)
    return (eye, change) if change.shape[1] <= change.shape[0] else (change, eye)
