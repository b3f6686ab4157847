"""Strict reader of adapter_config.json: every field that PEFT writes is read, known as harmless, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from loramux_adapters import strict_json
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.unsupported import check_activation, check_kind, check_known, check_switched_off

MAX_CONFIG_BYTES = 1 << 20
MAX_TARGETS = 10_000
MAX_PATTERNS = 1_024

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Rank = Annotated[int, Meta(ge=1, le=65_536)]
Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]
Layer = Annotated[int, Meta(ge=0, le=100_000)]
Regex = Annotated[str, Meta(min_length=1, max_length=65_536)]
Names = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_TARGETS)]
Invocation = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(min_length=1, max_length=4_096)]

TokenIds = Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 30)], ...], Meta(max_length=65_536)]

Task = Literal["CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION"]
"""PEFT's task types that are served: generating text, classifying it, and turning it into vectors."""

ALL_LINEAR = "all-linear"

HARMLESS: Mapping[str, str] = {
    "auto_mapping": "it is a note of PEFT's for itself",
    "corda_config": "it is read only beside init_lora_weights; a conversion to plain LoRA leaves it in the file",
    "eva_config": "it is how the ranks were found; rank_pattern holds the result",
    "fan_in_fan_out": "PEFT sets it by the class of the module, whatever the file says",
    "inference_mode": "it does not change the result",
    "lora_dropout": "it is for training only",
    "lora_ga_config": "it is read only beside init_lora_weights; a conversion to plain LoRA leaves it in the file",
    "megatron_core": "it is read only beside megatron_config",
    "peft_version": "the fields themselves decide",
    "qalora_group_size": "it is read only beside use_qalora",
    "revision": "the base is the one that is served",
    "runtime_config": "PEFT ignores it in a file",
}
"""Fields of LoraConfig that do not change what a trained adapter computes, and why."""

OTHER_TOOLS: Mapping[str, str] = {
    "lora_dtype": "ms-swift writes it; the tensors' own dtypes are read",
    "lorap_emb_lr": "ms-swift writes it; it is for training only",
    "lorap_lr_ratio": "ms-swift writes it; it is for training only",
}
"""Fields that other tools add to PEFT's, and why they do not change what a trained adapter computes."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that select modules, common to adapters of every kind; PEFT's names and meaning."""

    target_modules: Regex | Names
    """A regular expression for whole names, or names and suffixes of names; `all-linear`: see targets.py."""
    exclude_modules: Regex | Names | None = None
    layers_to_transform: Annotated[tuple[Layer, ...], Meta(max_length=MAX_TARGETS)] | None = None
    layers_pattern: Annotated[tuple[Name, ...], Meta(max_length=64)] | None = None
    base_model_name_or_path: str | None = None
    task_type: Task | None = None

    @property
    def all_linear(self) -> bool:
        """True if the targets are every linear but the head."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR


class LoraConfig(Targets, frozen=True, kw_only=True):
    """The fields of a LoRA's adapter_config.json that decide the computation."""

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: Annotated[dict[Name, Rank], Meta(max_length=MAX_PATTERNS)] = {}
    alpha_pattern: Annotated[dict[Name, Alpha], Meta(max_length=MAX_PATTERNS)] = {}
    alora_invocation_tokens: Invocation | None = None
    """The adapter is active from their last occurrence in a prompt on, and inactive where they do not occur."""
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    """The base's biases that were trained too. The file holds them, where the base has any."""
    modules_to_save: Names | None = None
    """Ends of names."""
    trainable_token_indices: TokenIds | Annotated[dict[Name, TokenIds], Meta(max_length=2)] | None = None
    """Token ids of the embedding, or token ids by the ends of modules' names."""
    ensure_weight_tying: bool = False
    target_modules: Regex | Names = ()
    """Optional beside target_parameters."""
    target_parameters: Names | None = None
    """Names of parameters or their ends."""

    def __post_init__(self) -> None:
        if not self.target_modules and not self.target_parameters:
            raise ConfigRejected(
                "field_missing", "target_modules", "adapter_config.json has no target_modules; PEFT always writes it."
            )
        for field in ("use_dora", "lora_bias"):
            if self.target_parameters and getattr(self, field):
                raise ConfigRejected("config_invalid", field, f"{field} cannot stand beside target_parameters.")
        if self.use_dora and self.lora_bias:
            raise ConfigRejected("config_invalid", "lora_bias", "lora_bias cannot stand beside use_dora.")


class Ia3Config(Targets, frozen=True, kw_only=True):
    """The fields of an IA3's adapter_config.json that decide the computation."""

    feedforward_modules: Regex | Annotated[tuple[str, ...], Meta(max_length=MAX_TARGETS)] = ()
    """A regular expression for whole names, or ends of names."""
    modules_to_save: Names | None = None
    """Ends of names."""


AdapterConfig = LoraConfig | Ia3Config

_READ = frozenset(LoraConfig.__struct_fields__)
_CHECKED = frozenset(("peft_type", "init_lora_weights"))
"""Fields that check_kind reads."""
_IA3 = frozenset(
    (
        *("feedforward_modules", "target_modules", "exclude_modules", "modules_to_save", "base_model_name_or_path"),
        *("auto_mapping", "fan_in_fan_out", "inference_mode", "init_ia3_weights", "peft_version", "revision"),
        *("peft_type", "task_type"),
    )
)
"""IA3Config's fields; the second line does not change what a trained adapter computes."""

T = TypeVar("T", bound=Targets)


def parse_adapter_config(data: bytes) -> AdapterConfig:
    """Read the bytes of an adapter_config.json.

    Raises ConfigRejected: `config_invalid` (not JSON, wrong type or range), `config_too_large`, `field_missing`,
    `field_unsupported`, `field_unknown`, `peft_type_unsupported`.
    """
    document = parse_document(data)
    check_kind(document)
    if document["peft_type"] == "IA3":
        check_known(document, _IA3)
        return read_fields(document, Ia3Config)
    check_switched_off(document)
    check_activation(document)
    check_known(document, _READ | HARMLESS.keys() | OTHER_TOOLS.keys() | _CHECKED)
    return read_fields(document, LoraConfig)


def read_fields(document: Mapping[str, Any], kind: type[T]) -> T:
    """Read the fields of `kind`. Raises ConfigRejected: `field_missing`, `config_invalid`."""
    for field in msgspec.structs.fields(kind):
        if field.required and document.get(field.name) is None:
            raise ConfigRejected(
                "field_missing", field.name, f"adapter_config.json has no {field.name}; PEFT always writes it."
            )
    config = _convert(document, kind)
    _check_layers(config, document)
    return config


def parse_document(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of an adapter_config.json. Raises ConfigRejected: `config_too_large`, `config_invalid`."""
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigRejected(
            "config_too_large", None, f"adapter_config.json has {len(data)} bytes; the maximum is {MAX_CONFIG_BYTES}."
        )
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise ConfigRejected("config_invalid", None, f"adapter_config.json is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise ConfigRejected("config_invalid", None, "adapter_config.json is not a JSON object.")
    return document


def _convert(document: Mapping[str, Any], kind: type[T]) -> T:
    read = frozenset(kind.__struct_fields__)
    given = {field: value for field, value in document.items() if field in read and value is not None}
    # PEFT writes a single name or index without a list, and reads an empty list as none.
    if type(index := given.get("layers_to_transform")) is int:
        given["layers_to_transform"] = [index]
    if isinstance(pattern := given.get("layers_pattern"), str):
        given["layers_pattern"] = [pattern] if pattern else []
    empty = ("exclude_modules", "modules_to_save", "target_parameters")
    for name in (*empty, "target_modules") if given.get("target_parameters") else empty:
        if given.get(name) in ("", []):
            del given[name]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.?([^.`\[]*)", str(error))
        field = path[1] if path and path[1] else None
        raise ConfigRejected("config_invalid", field, f"adapter_config.json is not valid: {error}.") from None


def _check_layers(config: Targets, document: Mapping[str, Any]) -> None:
    """Refuse combinations for which PEFT itself raises."""
    if isinstance(config.target_modules, str):
        for field in ("layers_to_transform", "layers_pattern"):
            if document.get(field) is not None:
                raise ConfigRejected(
                    "config_invalid", field, f"{field} cannot stand beside a target_modules that is a string."
                )
    elif config.layers_pattern and config.layers_to_transform is None:
        raise ConfigRejected("config_invalid", "layers_pattern", "layers_pattern needs layers_to_transform beside it.")
