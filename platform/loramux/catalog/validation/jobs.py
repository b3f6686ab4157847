"""Messages between the server and its limited processes: setups, jobs and the report on an upload. Plain data, as JSON.

The stages are files, choice of a base, conversion, bundle, parity and the rendering of templates. An upload's
`ValidationReport` is read by its owner: the contents of the files, the checks, and the reason of a refusal.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loramux.common.errors import Rejection
from loramux.common.sandbox.sandbox import ResourceUsage
from loramux.common.settings.serving import AdapterLimits, Quantization
from loramux_adapters.base import BaseDescription
from loramux_adapters.plan import PlanLimits


class FilesSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base that uploads are checked against."""

    base: BaseDescription
    base_names: tuple[str, ...]
    """Names of the base on this server, to compare with the name in an adapter's configuration."""
    serving: str
    """The dtype that weights are converted to when they are served: F32, F16 or BF16."""


class FilesJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, by its absolute path."""

    folder: str
    limits: PlanLimits


class RetiredBase(msgspec.Struct, frozen=True, kw_only=True):
    """A retired base. Adapters may name it, but it accepts no new adapters."""

    names: tuple[str, ...]
    message: str
    """The refusal, which names the base to use instead."""


class ChoiceJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder whose owner has named no base, and the bases among which one is chosen."""

    files: FilesJob
    bases: dict[str, FilesSetup]
    """The bases, by their names in requests."""
    retired: tuple[RetiredBase, ...] = ()


class ConversionSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base that adapters of other kinds are converted for."""

    model_dir: str
    base: BaseDescription
    quantization: Quantization = "none"
    """Quantization of the base's weights when they are loaded."""


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, and an empty folder for the converted adapter, by their absolute paths."""

    folder: str
    into: str
    limits: PlanLimits


class BundleSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base that bundles are made for."""

    model_dir: str


class BundleJob(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with files of a bundle, by its absolute path."""

    folder: str
    num_tokens: int
    """Rows of the embedding that the revision is served with."""
    task: str = "CAUSAL_LM"
    num_labels: int = 0


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """A template and its variables: messages, special tokens, and all variables of the request."""

    template: str
    variables: dict[str, Any]
    max_characters: int


Fault = Literal["too_long", "too_expensive", "forbidden", "invalid", "refused"]
"""The faults of a template. `refused`: the template refuses these messages, or fails with them."""


class RenderedText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rendered conversation, or the reason why there is none."""

    text: str = ""
    fault: Fault | None = None
    reason: str = ""


class ParitySetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base and the limits of a parity check."""

    model_dir: str
    base: BaseDescription
    adapters: AdapterLimits
    memory_bytes: int
    """Memory that one job may use."""
    whole_model_bytes: int
    """Maximum bytes of float32 weights of a base that is run as a whole."""
    engine_bytes: int = 0
    """Maximum float32 bytes of a larger base for which the serving engine answers the check's prompts."""
    serving: str = "float32"
    """The serving engine's dtype."""
    block_size: int | None = None
    """The serving engine's `engine.block_size`; None: chosen from the base, here as there."""
    quantization: Quantization = "none"
    """Quantization of the base's weights when they are loaded."""


class EngineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The serving engine's greedy answer to one prompt of a check."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class ParityJob(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that has passed the files' checks."""

    uploaded: str
    """The folder that PEFT reads."""
    served: str
    """The folder that is served. This is the uploaded folder, unless the adapter was converted."""
    limits: PlanLimits
    answers: tuple[EngineAnswer, ...] = ()
    """The serving engine's answers to the report's `to_answer`, and then the base's own answer to the first prompt.

    If there are answers, only these are compared."""


TOKENS_CHECK = "parity_of_tokens"
NAMES_CHECK = "names"
"""The check of an adapter whose tensors got other names. PEFT then reads the served files, not the uploaded ones."""

CheckOutcome = Literal["passed", "failed", "not_run"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of the files."""

    name: str
    outcome: CheckOutcome
    detail: str = ""
    """The reason why the check failed or was not run. For a parity check that passed, its method."""
    figures: dict[str, float] = {}


class ReportWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that is not a fault, but that the owner may not have intended."""

    code: str
    field: str | None
    message: str


class AdapterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the files."""

    peft_type: str
    peft_version: str | None
    base_model_name_or_path: str | None
    """The base on which the adapter claims to be trained. The files cannot prove this claim."""
    task: str = "CAUSAL_LM"
    """PEFT's task type. An adapter that names no task generates text."""
    labels: int = 0
    """Rows of a classifier's head."""
    architecture: str
    """Architecture of the served base, which the files were checked against."""
    rank: int
    """The largest rank."""
    ranks: dict[int, int]
    """Number of modules by rank."""
    targets: dict[str, int]
    """Number of modules by the last part of their names."""
    layers: int
    """Number of decoder layers with at least one of these modules."""
    tensors: int
    parameters: int
    dtypes: dict[str, int]
    """Number of tensors by dtype."""
    weights_bytes: int
    tokens: int
    """Rows of the embedding and the head with which it is served."""
    ignored_fields: dict[str, str]
    """Fields of adapter_config.json that have no effect here, and why."""


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an upload's validation. The JSON of the report is part of the HTTP API."""

    checks: tuple[Check, ...]
    base_model: str | None = None
    """The base that the files were checked against; None if no base was found for the files."""
    found: AdapterSummary | None = None
    """Contents of the files; None if the files were refused before they could be read."""
    converted: str | None = None
    """The conversion's kind and method, if the served adapter differs from the uploaded adapter."""
    to_convert: bool = False
    """True: the adapter's kind, or the form of its names, is converted first, and no check has run yet."""
    to_answer: tuple[list[int], ...] = ()
    """Prompts that the serving engine must answer before tokens can be compared; empty in a report for the owner."""
    warnings: tuple[ReportWarning, ...] = ()
    refusal: Rejection | None = None
    usage: ResourceUsage | None = None

    def followed_by(self, later: ValidationReport) -> ValidationReport:
        """Join this report with the report of the checks that ran later."""
        return msgspec.structs.replace(
            self,
            checks=self.checks + later.checks,
            found=later.found or self.found,
            warnings=self.warnings + later.warnings,
            refusal=self.refusal or later.refusal,
            usage=later.usage if self.usage is None else self.usage.plus(later.usage),
        )
