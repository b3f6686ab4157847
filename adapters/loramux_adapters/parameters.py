"""The pairs of a LoRA on parameters that belong to no linear: a mixture's experts and its router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loramux_adapters.base import BaseDescription, ParameterShape, part_name
from loramux_adapters.bounded import match_bounded
from loramux_adapters.config import LoraConfig
from loramux_adapters.errors import ConfigRejected, shown
from loramux_adapters.matching import Match, TargetRules
from loramux_adapters.parts import PartPair


def match_parameters(config: LoraConfig, base: BaseDescription) -> list[Match]:
    """The parameters that target_parameters names, whole or by their ends, in the base's order.

    Raises ConfigRejected (`target_unsupported`, `pattern_invalid`, `pattern_too_slow`).
    """
    wanted = config.target_parameters or ()
    for target in wanted:
        if not any(_means(target, name) for name in base.parameters):
            raise ConfigRejected("target_unsupported", "target_parameters", _unknown(target, base))
    found = tuple(name for name in base.parameters if any(_means(target, name) for target in wanted))
    if not found:
        return []
    # PEFT asks nothing else of a parameter: exclude_modules and layers_to_transform are of modules.
    rules = TargetRules(found, None, None, None, tuple(config.rank_pattern), tuple(config.alpha_pattern))
    return match_bounded(rules, found)


def part_pairs(
    parameter: str, targeted: Sequence[str], rank: int, scale: float, shape: ParameterShape
) -> Iterator[PartPair]:
    """A pair for each expert; `targeted` are all parameters of the adapter, in the base's order."""
    module = _module(parameter)
    # PEFT wraps a module once for each of its parameters, the last one outermost.
    outer = [other for other in targeted[targeted.index(parameter) + 1 :] if _module(other) == module]
    holder = module + ".base_layer" * len(outer)
    for expert in range(shape.num_experts):
        yield PartPair(
            part_name(parameter, expert),
            rank,
            scale,
            shape.in_features,
            shape.out_features,
            holder=holder,
            expert=expert,
            num_experts=shape.num_experts,
        )


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _unknown(target: str, base: BaseDescription) -> str:
    ends = tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in base.parameters))
    served = f"served are {shown(ends)}" if ends else "this base has none that is served"
    return f"target_parameters names {target[:120]!r}; of parameters that are no linear's, {served}."
