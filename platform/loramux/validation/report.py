"""What a customer reads about an upload: what was found, what was checked, and why it was refused."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux_adapters import AdapterRejected

Outcome = Literal["passed", "failed", "not_run"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One question that was asked of the files."""

    name: str
    outcome: Outcome
    detail: str = ""
    """Why it failed, or was not run; of a parity check, how it was made."""
    figures: dict[str, float] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing of it is served: a stable `code`, the `field` or tensor at fault, and a sentence."""

    code: str
    field: str | None
    message: str


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is no fault, and that its owner may not have meant."""

    code: str
    field: str | None
    message: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the files hold."""

    peft_type: str
    peft_version: str | None
    base_model_name_or_path: str | None
    """What the adapter says it was trained on: a claim, which nothing in the files can prove."""
    architecture: str
    """The base's, which is served here and which everything was checked against."""
    rank: int
    """The largest."""
    ranks: dict[int, int]
    """How many modules have which rank."""
    targets: dict[str, int]
    """How many modules of which name."""
    layers: int
    """How many decoder layers have at least one of them."""
    tensors: int
    parameters: int
    dtypes: dict[str, int]
    """How many tensors are saved as which dtype."""
    weights_bytes: int
    ignored_fields: dict[str, str]
    """Fields of adapter_config.json that change nothing here, and why."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks took, in their processes."""

    cpu_seconds: float
    peak_bytes: int
    """Of resident memory, what it shares with the warm process included."""

    def plus(self, other: Usage | None) -> Usage:
        """Of two processes, one after the other."""
        if other is None:
            return self
        seconds = round(self.cpu_seconds + other.cpu_seconds, 3)
        return Usage(cpu_seconds=seconds, peak_bytes=max(self.peak_bytes, other.peak_bytes))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an upload's validation."""

    checks: tuple[Check, ...]
    found: Found | None = None
    """None where the files were refused before it was known."""
    converted: str | None = None
    """From what, and how, where what is served is not what was uploaded."""
    to_convert: bool = False
    """Nothing was asked yet: the adapter is of a kind that becomes a LoRA first."""
    warnings: tuple[Warned, ...] = ()
    refusal: Refusal | None = None
    usage: Usage | None = None

    def followed_by(self, later: Report) -> Report:
        """Both, where `later` holds the checks that came after these."""
        return msgspec.structs.replace(
            self,
            checks=self.checks + later.checks,
            found=later.found or self.found,
            warnings=self.warnings + later.warnings,
            refusal=self.refusal or later.refusal,
            usage=later.usage if self.usage is None else self.usage.plus(later.usage),
        )

    def demand_sound(self) -> None:
        """Raise loramux_adapters.AdapterRejected where the adapter was refused."""
        if self.refusal is not None:
            raise AdapterRejected(self.refusal.code, self.refusal.field, self.refusal.message)
