"""What the parity check is asked."""

from __future__ import annotations

import msgspec

from loramux.settings import AdapterLimits
from loramux_adapters import BaseDescription, Limits


class ParitySetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base."""

    model_dir: str
    base: BaseDescription
    adapters: AdapterLimits
    """What the server takes."""
    memory_bytes: int
    """That a job may use."""
    whole_model_bytes: int
    """Bases up to so many bytes of float32 weights are run whole."""


class ParityJob(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that the files' checks have passed."""

    uploaded: str
    """The folder that PEFT reads."""
    served: str
    """The folder that is served: the same, unless it was converted."""
    limits: Limits
