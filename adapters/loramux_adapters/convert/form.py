"""What a kind of adapter is, to a converter: the tensors that it keeps for a linear, and the pair that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from loramux_adapters.base import LinearShape
from loramux_adapters.config import MAX_PATTERNS, Name, Rank, Targets
from loramux_adapters.matching import Match

Tensors = Mapping[str, torch.Tensor]
"""float64, by the last parts of their names: `lora_A`; those that all linears share by their whole names."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A `[rank, in_features]` and B `[out_features, rank]`: the linear's weight gains exactly B @ A."""
Shape = tuple[int, ...]
Ranks = Annotated[dict[Name, Rank], Meta(max_length=MAX_PATTERNS)]


@dataclass(frozen=True, slots=True)
class Factors:
    """One linear's share of an adapter."""

    shapes: Mapping[str, Shape]
    """Its tensors, by the last parts of their names."""
    rank: int
    """That of the pair before folding: what the kind's algebra gives."""
    pair: Callable[[Tensors], Pair]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may stand there once more, and the whole names of the shared ones that they must equal."""


class Form(Targets, frozen=True, kw_only=True):
    """The fields of an adapter_config.json that decide what a kind computes; PEFT's names and meaning."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """The kind's own fields that have no effect on a trained adapter."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Its own fields that must be off, and the way out where one is on."""

    @property
    def rank_keys(self) -> tuple[str, ...]:
        """Keys of the pattern that changes ranks."""
        return ()

    @property
    def alpha_keys(self) -> tuple[str, ...]:
        """Keys of the pattern that changes scales."""
        return ()

    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:  # noqa: ARG002 - most share nothing
        """The tensors that the adapted `linears` share, by their whole names."""
        return {}

    def factors(self, match: Match, linear: LinearShape) -> Factors:
        """What the file holds for one linear. Raises ConfigRejected where the kind does not fit it."""
        raise NotImplementedError


def folded(pair: Pair) -> Pair:
    """The same product at the rank of the smaller side: one factor is the product, the other the identity."""
    a, b = pair
    delta = b @ a
    eye = torch.eye(min(delta.shape), dtype=delta.dtype)
    return (eye, delta) if delta.shape[1] <= delta.shape[0] else (delta, eye)
