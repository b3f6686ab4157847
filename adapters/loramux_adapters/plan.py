"""Which tensors a configuration implies on a base, by name and shape, held against those that the file has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loramux_adapters.base import BaseDescription
from loramux_adapters.config import LoraConfig
from loramux_adapters.errors import ConfigRejected, WeightsFileRejected
from loramux_adapters.expected import check_tensors
from loramux_adapters.header import SafetensorsHeader
from loramux_adapters.matching import Match
from loramux_adapters.targets import check_linears, context, match_targets

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator allows."""

    max_rank: int = 256
    max_bytes: int = 2 << 30
    """Of the weights file."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapted linear: `y += scale * (x @ A.T) @ B.T`, A `[rank, in_features]` and B `[out_features, rank]`."""

    module: str
    rank: int
    scale: float
    in_features: int
    out_features: int

    @property
    def a_key(self) -> str:
        """A's name in the file."""
        return f"{PREFIX}{self.module}.lora_A.weight"

    @property
    def b_key(self) -> str:
        """B's name in the file."""
        return f"{PREFIX}{self.module}.lora_B.weight"

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Both tensors as PEFT saves them."""
        return {self.a_key: (self.rank, self.in_features), self.b_key: (self.out_features, self.rank)}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """A validated adapter: what its file holds, exactly."""

    pairs: tuple[LoraPair, ...]
    """In the order of the base's modules."""
    file_bytes: int
    invocation: tuple[int, ...] | None = None
    """Of an activated LoRA, the token ids from whose last occurrence in a prompt on it serves."""

    @property
    def max_rank(self) -> int:
        """The largest rank of any pair."""
        return max(pair.rank for pair in self.pairs)


def plan_adapter(config: LoraConfig, header: SafetensorsHeader, base: BaseDescription, limits: Limits) -> AdapterPlan:
    """The plan of an adapter whose tensors are exactly those that `config` implies on `base`.

    Raises ConfigRejected (`config_invalid`, `pattern_invalid`, `pattern_too_slow`, `target_unsupported`,
    `rank_too_large`, `scale_invalid`), WeightsFileRejected (`weights_too_large`) or BaseMismatch (`no_module_matched`,
    `tensors_missing`, `tensors_unexpected`, `shape_mismatch`).
    """
    _check_size(header, limits)
    _check_invocation(config, base)
    matches = match_targets(config, base, tuple(config.rank_pattern), tuple(config.alpha_pattern))
    check_linears(matches, base)
    pairs = tuple(_pair(match, config, base, limits) for match in matches)
    _check_tensors(pairs, header, config, base)
    return AdapterPlan(pairs, header.file_bytes, config.alora_invocation_tokens)


def _check_size(header: SafetensorsHeader, limits: Limits) -> None:
    if header.file_bytes > limits.max_bytes:
        raise WeightsFileRejected(
            "weights_too_large", None, f"The weights have {header.file_bytes} bytes; {limits.max_bytes} are taken."
        )


def _check_invocation(config: LoraConfig, base: BaseDescription) -> None:
    if (largest := max(config.alora_invocation_tokens or (0,))) >= base.vocab_size:
        raise ConfigRejected(
            "config_invalid",
            "alora_invocation_tokens",
            f"alora_invocation_tokens has {largest}; this server's base has the tokens 0 to {base.vocab_size - 1}. Use "
            "the ids that the base's own tokenizer gives.",
        )


def _pair(match: Match, config: LoraConfig, base: BaseDescription, limits: Limits) -> LoraPair:
    rank = config.rank_pattern.get(match.rank_key, config.r)
    alpha = config.alpha_pattern.get(match.alpha_key, config.lora_alpha)
    if rank > limits.max_rank:
        raise ConfigRejected(
            "rank_too_large",
            "rank_pattern" if match.rank_key in config.rank_pattern else "r",
            f"{match.module} has rank {rank}; this server takes up to {limits.max_rank}. Train with a smaller r, or "
            "ask the operator to raise adapters.max_rank.",
        )
    shape = base.modules[match.module]
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    return LoraPair(match.module, rank, scale, shape.in_features, shape.out_features)


def _check_tensors(
    pairs: tuple[LoraPair, ...], header: SafetensorsHeader, config: LoraConfig, base: BaseDescription
) -> None:
    expected = {key: shape for pair in pairs for key, shape in pair.shapes.items()}
    check_tensors(expected, header, context(base, config.base_model_name_or_path))
