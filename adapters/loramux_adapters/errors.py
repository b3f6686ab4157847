"""Errors of this package.

AdapterRejected          an adapter that will not be served
├── ConfigRejected       adapter_config.json asks for what this server does not do, or is not valid
├── WeightsFileRejected  the weights file is missing, not safetensors, damaged, or holds NaN
└── BaseMismatch         configuration and weights do not fit the base model, or each other
BaseUnusable             the base model itself cannot be described

This tree is apart from `loramux.common.errors` on purpose: the package is below loramux and does not import it, so that
the package can also be used as a library. An AdapterRejected carries the same three facts (code, field, message); the
catalog turns it into its own error at the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 3


class AdapterRejected(Exception):
    """The adapter is refused: a stable `code`, the `field` or tensor at fault if there is one, and a sentence."""

    def __init__(self, code: str, field: str | None, message: str) -> None:
        super().__init__(code, field, message)
        self.code = code
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return self.message


class ConfigRejected(AdapterRejected):
    """adapter_config.json cannot be served in this form; the message explains the conversion."""


class WeightsFileRejected(AdapterRejected):
    """adapter_model.safetensors is missing, damaged, unsafe, or holds values that are not finite."""


class BaseMismatch(AdapterRejected):
    """The tensors do not match those that the configuration implies on this base."""


class BaseUnusable(ValueError):
    """The base model's folder cannot be read as a transformers causal language model."""


def shown(names: Sequence[str], limit: int = MAX_SHOWN) -> str:
    """List the first `limit` names, each cut to fit a sentence, and the number of the others."""
    listed = ", ".join(repr(name[:120]) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
