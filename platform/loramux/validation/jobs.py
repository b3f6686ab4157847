"""Setups and jobs of the limited processes: files, conversion, bundle, parity, templates. Plain data, sent as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loramux.settings import AdapterLimits, Quantization
from loramux_adapters import BaseDescription, Limits


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
    limits: Limits


class NoSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a stage whose jobs say everything."""


class RetiredBase(msgspec.Struct, frozen=True, kw_only=True):
    """A base that adapters may name and that takes no more of them."""

    names: tuple[str, ...]
    message: str
    """Says what to upload instead."""


class ChoiceJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, and the bases among which one is chosen for it, because its owner has named none."""

    files: FilesJob
    bases: dict[str, FilesSetup]
    """By the name in requests."""
    retired: tuple[RetiredBase, ...] = ()


class ConversionSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The base that adapters of other kinds are converted for."""

    model_dir: str
    base: BaseDescription
    quantization: Quantization = "none"
    """How the base's weights are quantized when it is loaded."""


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """One folder and an empty one for the converted adapter, by their absolute paths."""

    folder: str
    into: str
    limits: Limits


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
    """A template and its variables: messages, special tokens, and whatever the request passes on."""

    template: str
    variables: dict[str, Any]
    max_characters: int


Fault = Literal["too_long", "too_expensive", "forbidden", "invalid", "refused"]
"""`refused`: by the template itself, or by an error in it on these messages."""


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
    """The most bytes of float32 weights of a base that is run whole."""
    engine_bytes: int = 0
    """The most bytes of float32 weights of a larger base whose serving engine answers the check's prompts."""
    serving: str = "float32"
    """The serving engine's dtype."""
    quantization: Quantization = "none"
    """How the base's weights are quantized when it is loaded."""


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
    """The folder that is served: the same, unless the adapter was converted."""
    limits: Limits
    answers: tuple[EngineAnswer, ...] = ()
    """The serving engine's answers to the report's `to_answer`, and last the base's own to the first of them. With
    answers only these are compared."""
