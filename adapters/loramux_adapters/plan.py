"""Which tensors a configuration implies on a base, by name and shape, held against those that the file has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loramux_adapters.base import BaseDescription
from loramux_adapters.bounded import match_bounded
from loramux_adapters.config import LoraConfig
from loramux_adapters.errors import BaseMismatch, ConfigRejected, WeightsFileRejected, shown
from loramux_adapters.header import SafetensorsHeader
from loramux_adapters.matching import Match, TargetRules

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

    @property
    def max_rank(self) -> int:
        """The largest rank of any pair."""
        return max(pair.rank for pair in self.pairs)


def plan_adapter(config: LoraConfig, header: SafetensorsHeader, base: BaseDescription, limits: Limits) -> AdapterPlan:
    """The plan of an adapter whose tensors are exactly those that `config` implies on `base`.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`, `target_unsupported`, `rank_too_large`,
    `scale_invalid`), WeightsFileRejected (`weights_too_large`) or BaseMismatch (`no_module_matched`,
    `tensors_missing`, `tensors_unexpected`, `shape_mismatch`).
    """
    _check_size(header, limits)
    matches = match_bounded(_rules(config, base), base.names)
    _check_targets(matches, config, base)
    pairs = tuple(_pair(match, config, base, limits) for match in matches)
    _check_tensors(pairs, header, config, base)
    return AdapterPlan(pairs, header.file_bytes)


def _check_size(header: SafetensorsHeader, limits: Limits) -> None:
    if header.file_bytes > limits.max_bytes:
        raise WeightsFileRejected(
            "weights_too_large", None, f"The weights have {header.file_bytes} bytes; {limits.max_bytes} are taken."
        )


def _rules(config: LoraConfig, base: BaseDescription) -> TargetRules:
    return TargetRules(
        target_modules=tuple(base.modules) if config.all_linear else config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        rank_keys=tuple(config.rank_pattern),
        alpha_keys=tuple(config.alpha_pattern),
    )


def _check_targets(matches: list[Match], config: LoraConfig, base: BaseDescription) -> None:
    if not matches:
        raise BaseMismatch(
            "no_module_matched",
            "target_modules",
            f"target_modules {_written(config.target_modules)} matches no module of this server's base. "
            f"{_expects(base)}",
        )
    for match in matches:
        if (kind := base.others.get(match.module)) is not None:
            raise ConfigRejected("target_unsupported", "target_modules", _unsupported(match.module, kind, base))


def _unsupported(module: str, kind: str, base: BaseDescription) -> str:
    if module == base.output_head:
        reason = "the output head, whose LoRA is not served"
    elif kind == "Embedding":
        reason = "an embedding, whose LoRA is not served"
    else:
        reason = f"a {kind} and no linear layer"
    return f"target_modules names {module!r}, {reason}. Train on the decoder's linear layers, e.g. with all-linear."


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
    if missing := [key for key in expected if key not in header.tensors]:
        raise BaseMismatch(
            "tensors_missing",
            missing[0],
            f"{len(missing)} of the {len(expected)} tensors that adapter_config.json implies on this base are not in "
            f"the file: {shown(missing)}. {_context(config, base)}",
        )
    if unexpected := [key for key in header.tensors if key not in expected]:
        raise BaseMismatch(
            "tensors_unexpected",
            unexpected[0],
            f"{len(unexpected)} tensors of the file are not among the {len(expected)} that adapter_config.json implies "
            f"on this base: {shown(unexpected)}. {_context(config, base)}",
        )
    _check_shapes(expected, header, config, base)


def _check_shapes(
    expected: Mapping[str, tuple[int, ...]], header: SafetensorsHeader, config: LoraConfig, base: BaseDescription
) -> None:
    wrong = [key for key, shape in expected.items() if header.tensors[key].shape != shape]
    if wrong:
        listed = "; ".join(
            f"{key} is {list(header.tensors[key].shape)}, expected {list(expected[key])}" for key in wrong[:3]
        )
        raise BaseMismatch(
            "shape_mismatch",
            wrong[0],
            f"{len(wrong)} of {len(expected)} tensors have another shape than rank and base imply: {listed}. "
            f"{_context(config, base)}",
        )


def _written(target_modules: str | tuple[str, ...]) -> str:
    return repr(target_modules[:120]) if isinstance(target_modules, str) else shown(target_modules)


def _expects(base: BaseDescription) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in base.modules)
    return (
        f"The base is a {base.architecture} with {base.num_layers} layers of hidden size {base.hidden_size}; its "
        f"linear layers are {shown(tuple(leaves), limit=12)}."
    )


def _context(config: LoraConfig, base: BaseDescription) -> str:
    trained_on = config.base_model_name_or_path
    named = f" The adapter says it was trained on {trained_on[:120]!r}." if trained_on else ""
    return f"{_expects(base)}{named}"
