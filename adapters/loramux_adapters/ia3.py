"""IA3: a vector for each targeted linear, which scales what it gives or, in a feed-forward module, what it takes.

Source: `IA3Config` and `IA3Model` (peft/tuners/ia3) of PEFT 0.21.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from loramux_adapters.base import BaseDescription, siblings
from loramux_adapters.bounded import match_bounded
from loramux_adapters.config import Ia3Config
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import TargetRules
from loramux_adapters.parts import VectorKind, VectorPart
from loramux_adapters.targets import match_targets


def ia3_vectors(config: Ia3Config, base: BaseDescription) -> tuple[VectorPart, ...]:
    """A vector for each targeted linear, in the order of the base's modules.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`, `target_unsupported`) or BaseMismatch
    (`no_module_matched`).
    """
    feed_forward = _feed_forward(config.feedforward_modules, base)
    matches = match_targets(config, base, (), ())
    return tuple(_vector(match.module, match.module in feed_forward, base) for match in matches)


def _feed_forward(written: str | Sequence[str], base: BaseDescription) -> frozenset[str]:
    if not isinstance(written, str):
        return frozenset(name for name in base.names if any(name.endswith(end) for end in written))
    matches = match_bounded(TargetRules(written, None, None, None, (), (), "feedforward_modules"), base.names)
    return frozenset(match.module for match in matches)


def _vector(module: str, is_feed_forward: bool, base: BaseDescription) -> VectorPart:
    vocabulary = base.vocabulary
    if vocabulary is not None and module == vocabulary.head:
        if not is_feed_forward:
            return VectorPart(module, VectorKind.OUTPUT, vocabulary.num_tokens)
        raise _unsupported(module, "feedforward_modules", "the output head, whose input is not scaled")
    shape = base.modules.get(module)
    if shape is None or shape.transposed:
        raise _unsupported(module, "target_modules", f"a {base.others.get(module, 'Conv1D')}")
    if not is_feed_forward:
        return VectorPart(module, VectorKind.OUTPUT, shape.out_features)
    if others := siblings(module, base.modules):
        reason = f"which reads the same input as {', '.join(others)} and is computed together with it"
        raise _unsupported(module, "feedforward_modules", reason)
    return VectorPart(module, VectorKind.INPUT, shape.in_features)


def _unsupported(module: str, field: str, reason: str) -> ConfigRejected:
    return ConfigRejected(
        "target_unsupported",
        field,
        f"{field} means {module!r}, {reason}. IA3 is served on linear layers' outputs and, for feedforward_modules, on "
        "the inputs of down_proj and others that read an input of their own.",
    )
