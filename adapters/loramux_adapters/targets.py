"""Which modules of a base a configuration means, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loramux_adapters.base import BaseDescription
from loramux_adapters.bounded import match_bounded
from loramux_adapters.config import Targets
from loramux_adapters.errors import BaseMismatch, ConfigRejected, shown
from loramux_adapters.matching import Match, TargetRules


def match_targets(
    config: Targets, base: BaseDescription, rank_keys: Sequence[str], alpha_keys: Sequence[str]
) -> list[Match]:
    """The modules that `config` means, in the base's order; at least one.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`) or BaseMismatch (`no_module_matched`).
    """
    rules = TargetRules(
        target_modules=tuple(base.modules) if config.all_linear else config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        rank_keys=rank_keys,
        alpha_keys=alpha_keys,
    )
    matches = match_bounded(rules, base.names)
    if not matches:
        raise BaseMismatch(
            "no_module_matched",
            "target_modules",
            f"target_modules {_written(config.target_modules)} matches no module of this server's base. "
            f"{_expects(base)}",
        )
    return matches


def check_linears(matches: Iterable[Match], base: BaseDescription) -> None:
    """Raise ConfigRejected (`target_unsupported`) unless all are linears that adapters may touch."""
    for match in matches:
        if (kind := base.others.get(match.module)) is not None:
            raise unsupported_target(match.module, kind)


def context(base: BaseDescription, trained_on: str | None) -> str:
    """What the base is, and what the adapter says it was trained on: the end of a message about a mismatch."""
    named = f" The adapter says it was trained on {trained_on[:120]!r}." if trained_on else ""
    return f"{_expects(base)}{named}"


def unsupported_target(module: str, kind: str) -> ConfigRejected:
    """The refusal of a target of the class `kind`."""
    return ConfigRejected(
        "target_unsupported",
        "target_modules",
        f"target_modules names {module!r}, a {kind} and no linear layer of the decoder. Train on those, e.g. with "
        "all-linear.",
    )


def _written(target_modules: str | tuple[str, ...]) -> str:
    return repr(target_modules[:120]) if isinstance(target_modules, str) else shown(target_modules)


def _expects(base: BaseDescription) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in base.modules)
    return (
        f"The base is a {base.architecture} with {base.num_layers} layers of hidden size {base.hidden_size}; its "
        f"linear layers are {shown(tuple(leaves), limit=12)}."
    )
