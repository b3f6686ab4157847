"""Checks of an adapter of any kind against a base: the modules it targets, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from loramux_adapters.base import BaseDescription
from loramux_adapters.config import Targets
from loramux_adapters.errors import BaseMismatch, ConfigRejected, shown
from loramux_adapters.matching import Match, TargetRules
from loramux_adapters.regex_guard import match_guarded
from loramux_adapters.weights_file import SafetensorsHeader


def match_targets(
    config: Targets, base: BaseDescription, rank_keys: Sequence[str], alpha_keys: Sequence[str]
) -> list[Match]:
    """Return the modules that `config` means, in the base's order; at least one.

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
    matches = match_guarded(rules, base.names)
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


def describe_context(base: BaseDescription, trained_on: str | None) -> str:
    """Describe the base and the base that the adapter claims: the end of a message about a mismatch."""
    named = f" The adapter says it was trained on {trained_on[:120]!r}." if trained_on else ""
    return f"{_expects(base)}{named}"


def unsupported_target(module: str, kind: str) -> ConfigRejected:
    """Make the refusal of a target of class `kind`."""
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


Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(
    expected: Shapes, header: SafetensorsHeader, context: str, optional: Shapes = MappingProxyType({})
) -> None:
    """Raise BaseMismatch (`tensors_missing`, `tensors_unexpected`, `shape_mismatch`) unless the file holds `expected`.

    The file may also hold any of `optional`. `context` ends each message; see describe_context.
    """
    if missing := [key for key in expected if key not in header.tensors]:
        raise BaseMismatch(
            "tensors_missing",
            missing[0],
            f"{len(missing)} of the {len(expected)} tensors that adapter_config.json implies on this base are not in "
            f"the file: {shown(missing)}. {context}",
        )
    if unexpected := [key for key in header.tensors if key not in expected and key not in optional]:
        raise BaseMismatch(
            "tensors_unexpected",
            unexpected[0],
            f"{len(unexpected)} tensors of the file are not among the {len(expected)} that adapter_config.json implies "
            f"on this base: {shown(unexpected)}. {context}",
        )
    found = {**expected, **{key: shape for key, shape in optional.items() if key in header.tensors}}
    wrong = [key for key, shape in found.items() if header.tensors[key].shape != tuple(shape)]
    if wrong:
        listed = "; ".join(
            f"{key} is {list(header.tensors[key].shape)}, expected {list(found[key])}" for key in wrong[:3]
        )
        raise BaseMismatch(
            "shape_mismatch",
            wrong[0],
            f"{len(wrong)} of {len(found)} tensors have another shape than rank and base imply: {listed}. {context}",
        )
