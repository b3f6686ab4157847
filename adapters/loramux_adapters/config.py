"""Strict reader of adapter_config.json: every field that PEFT writes is read, known as harmless, or refused with an
error that names it.

`LoraConfig` and `Ia3Config` are the fields that decide the computation. `HARMLESS` and `OTHER_TOOLS` are the fields
that do not change the result of a trained adapter. `UNSUPPORTED_FIELDS` and `UNSUPPORTED_KINDS` are the fields and
kinds that PEFT 0.21.2 knows and this server does not serve: each entry has the reason and the way out. A listed field
is refused only if it is on, because PEFT writes null, false or an empty value for "off". Any other field is refused
unless its value is neutral.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from loramux_adapters import strict_json
from loramux_adapters.errors import ConfigRejected

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

Task = Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"]
"""PEFT's task types that are served: generating text, classifying it, classifying each of its tokens, and turning it
into vectors.
"""

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
"""Fields of LoraConfig that do not change the result of a trained adapter, and the reason."""

OTHER_TOOLS: Mapping[str, str] = {
    "lora_dtype": "ms-swift writes it; the tensors' own dtypes are read",
    "lorap_emb_lr": "ms-swift writes it; it is for training only",
    "lorap_lr_ratio": "ms-swift writes it; it is for training only",
}
"""Fields that other tools add to PEFT's, and why they do not change the result of a trained adapter."""


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
    """Token ids: the adapter is active from their last occurrence in a prompt on, and inactive in a prompt without
    them."""
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    """The base's biases that were trained too. The adapter's file holds these biases if the base has biases."""
    modules_to_save: Names | None = None
    """Ends of names."""
    trainable_token_indices: TokenIds | Annotated[dict[Name, TokenIds], Meta(max_length=2)] | None = None
    """Token ids of the embedding, or token ids by the ends of modules' names."""
    ensure_weight_tying: bool = False
    target_modules: Regex | Names = ()
    """Targets; optional if there are target_parameters."""
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
"""IA3Config's fields; the second line does not change the result of a trained adapter."""

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


class Unsupported(NamedTuple):
    """The reason that a field or kind is not served, and the way out."""

    reason: str
    way_out: str


_TO_LORA = "Convert it to a LoRA with peft.save_as_lora(path, model, rank=...) and upload the result."
_RETRAIN = "Train the adapter without it."
RESTORE = (
    "Save the adapter again with save_pretrained(..., path_initial_model_for_weight_conversion=<folder of the adapter "
    "as it was initialised>): PEFT then writes an ordinary LoRA for the unchanged base."
)
_NO_BIAS = "Train with bias='none'; lora_bias=true is served."

_LOFTQ = Unsupported(
    "LoftQ replaces the base's weights by quantised ones, and PEFT cannot convert such an adapter.",
    "Train it without, or start with peft.replace_lora_weights_loftq on a 4-bit base: its adapter is an ordinary LoRA.",
)

UNSUPPORTED_FIELDS: Mapping[str, Unsupported] = {
    "layer_replication": Unsupported(
        "It builds a deeper model than the base that is served.", "Train on the base's own layers."
    ),
    "use_qalora": Unsupported("QALoRA pools the inputs of a quantised base.", _RETRAIN),
    "loftq_config": _LOFTQ,
    "kasa_config": Unsupported("KaSA truncates the base's weights and adds a diagonal between A and B.", _RETRAIN),
    "monteclora_config": Unsupported("MonteCLoRA adds sampled perturbations to A.", _RETRAIN),
    "velora_config": Unsupported(
        "VeLoRA stores a training buffer beside every pair.",
        "Its forward is plain LoRA's: delete the lora_velora_embed tensors and set velora_config to null.",
    ),
    "use_bdlora": Unsupported(
        "BD-LoRA stores A or B as the blocks of a block-diagonal matrix.",
        "Write the blocks out into full matrices (torch.block_diag) and set use_bdlora to null.",
    ),
    "arrow_config": Unsupported("Arrow routes between several adapters inside one.", "Upload the adapters singly."),
    "megatron_config": Unsupported("Megatron's parallel layers are not those of the base that is served.", _RETRAIN),
}

_TRAIN_LORA = "Train a LoRA on the same data (peft.LoraConfig) and upload that."
_PROMPT = "It puts trained vectors before the prompt; requests here consist of tokens only."
_WEIGHTS = "Its change depends on the base's own weights, which an upload does not contain."
_DENSE = "Its change to a weight has full rank, which no LoRA of a served rank expresses exactly."
_SERVED = "LORA and IA3 are served, and other kinds that are converted to LORA at upload."
_ROUTES = "It chooses between several adapters inside one, token by token."

UNSUPPORTED_KINDS: Mapping[str, Unsupported] = {
    "ADAMSS": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "ADAPTION_PROMPT": Unsupported("It puts trained vectors into the attention of every layer.", _TRAIN_LORA),
    "BEFT": Unsupported("It trains biases, which are not served.", _TRAIN_LORA),
    "CARTRIDGE": Unsupported("It brings a KV cache of its own, computed elsewhere.", _TRAIN_LORA),
    "CPT": Unsupported(_PROMPT, _TRAIN_LORA),
    "DEFT": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "FOURIERFT": Unsupported(_DENSE, _TO_LORA),
    "FROD": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "GLORA": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "HIRA": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "LILY": Unsupported(_ROUTES, _TRAIN_LORA),
    "LN_TUNING": Unsupported("It trains the base's norms, which are not served beside other adapters.", _TRAIN_LORA),
    "MULTITASK_PROMPT_TUNING": Unsupported(_PROMPT, _TRAIN_LORA),
    "OSF": Unsupported("It splits the base's weights and trains a part of them.", _TRAIN_LORA),
    "PEANUT": Unsupported(_WEIGHTS, _TRAIN_LORA),
    "POLY": Unsupported(_ROUTES, _TRAIN_LORA),
    "PREFIX_TUNING": Unsupported("It puts trained keys and values before every layer's own.", _TRAIN_LORA),
    "PROMPT_TUNING": Unsupported(_PROMPT, _TRAIN_LORA),
    "PSOFT": Unsupported(_WEIGHTS, _TO_LORA),
    "P_TUNING": Unsupported(_PROMPT, _TRAIN_LORA),
    "ROAD": Unsupported("It rotates the outputs of the base's linears.", _TRAIN_LORA),
    "SHADOW": Unsupported("It brings a second network that runs beside the base.", _TRAIN_LORA),
    "SHIRA": Unsupported("It changes single weights all over the matrix, which has full rank.", _TRAIN_LORA),
    "SUPERTUNING": Unsupported("It changes single weights all over the matrix, which has full rank.", _TRAIN_LORA),
    "TINYLORA": Unsupported(_WEIGHTS, _TO_LORA),
    "TRAINABLE_TOKENS": Unsupported(
        "Trained rows of the embedding are served beside a LoRA.", "Train a LoRA with trainable_token_indices."
    ),
    "UNILORA": Unsupported("Its file holds indices into one trained vector.", _TO_LORA),
    "WAVEFT": Unsupported(_DENSE, _TO_LORA),
    "XLORA": Unsupported(_ROUTES, "Upload the adapters singly."),
}
"""The kinds (`peft_type`) that are neither served nor converted to a LoRA."""

CONVERTED = frozenset(
    (
        "ADALORA",
        "BOFT",
        "C3A",
        "DELORA",
        "GRALORA",
        "HRA",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "PVERA",
        "RANDLORA",
        "VBLORA",
        "VERA",
    )
)
"""The kinds that become a LoRA at upload (convert/conversion.py)."""

_WITHOUT_ALORA = ("use_dora", "bias", "modules_to_save", "trainable_token_indices", "target_parameters")
"""Fields that PEFT, if there are alora_invocation_tokens, applies to the tokens before the invocation too, or
ignores."""

HEADLESS_TASKS = ("SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION")
"""Tasks whose adapters are trained on the base without its output head."""
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga")
_LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


def check_switched_off(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected (`field_unsupported`) for the first field of UNSUPPORTED_FIELDS that is on."""
    for field, refusal in UNSUPPORTED_FIELDS.items():
        if is_on(document.get(field)):
            raise ConfigRejected(
                "field_unsupported", field, f"{field} is set in adapter_config.json. {refusal.reason} {refusal.way_out}"
            )


def check_activation(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected (`field_unsupported`) for an activated LoRA that changes earlier tokens."""
    if document.get("alora_invocation_tokens") is None:
        return
    for field in _WITHOUT_ALORA:
        if is_on(document.get(field)) and document[field] != "none":
            raise ConfigRejected(
                "field_unsupported",
                field,
                f"{field} is set in adapter_config.json beside alora_invocation_tokens: the tokens "
                "before the invocation would not be the base's any more. Train without one of them.",
            )


def check_known(document: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ConfigRejected (`field_unknown`) for a field that no PEFT known here has, unless its value is neutral.

    PEFT itself ignores fields that it does not know. Here a field is ignored only if its value is neutral: a field that
    a later PEFT added and switched on would change the answers.
    """
    for field, value in document.items():
        if field not in known and field not in UNSUPPORTED_FIELDS and not _is_neutral(value):
            raise ConfigRejected(
                "field_unknown",
                field[:120],
                f"adapter_config.json has a field {field[:120]!r} that this server does not know (it knows those of "
                "PEFT 0.21.2) and therefore cannot promise to serve. Remove it if it has no effect on the trained "
                "weights, or save the adapter with PEFT 0.21.",
            )


def check_kind(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected unless the file is a LoRA or an IA3 for text generation that left the base unchanged."""
    _check_peft_type(document.get("peft_type"))
    check_task_type(document.get("task_type"), is_lora=document["peft_type"] == "LORA")
    _check_initialisation(document.get("init_lora_weights", True))


def converted_kind(document: Mapping[str, Any]) -> str | None:
    """Return the kind or initialisation if the adapter must be converted to a LoRA first; otherwise None."""
    kind, first = document.get("peft_type"), document.get("init_lora_weights")
    if kind == "LORA" and isinstance(first, str) and (first == "pissa" or first.lower() == "olora"):
        return first.upper()
    return kind if isinstance(kind, str) and kind in CONVERTED else None


def is_on(value: Any) -> bool:
    """True if `value` switches its field on. 0 counts as on, because the meaning of an unknown field's number is
    unknown."""
    return value is not None and value is not False and value not in ("", [], {})


def _is_neutral(value: Any) -> bool:
    """True if a value of an unknown field is neutral: off, zero, "none", or an object of such values.

    A 0 in a list is not neutral: it may be the index of a layer or a token.
    """
    if isinstance(value, dict):
        return all(map(_is_neutral, value.values()))
    if isinstance(value, list):
        return not any(is_on(item) for item in value)
    if isinstance(value, str):
        return value.lower() in ("", "none")
    return not value


def _check_peft_type(value: Any) -> None:
    if value in ("LORA", "IA3"):
        return
    if value is None:
        raise ConfigRejected("field_missing", "peft_type", "adapter_config.json has no peft_type; LORA is expected.")
    refusal = UNSUPPORTED_KINDS.get(value) if isinstance(value, str) else None
    reason, way_out = refusal or (_SERVED, _TO_LORA)
    raise ConfigRejected("peft_type_unsupported", "peft_type", f"peft_type is {str(value)[:40]!r}. {reason} {way_out}")


def check_task_type(value: Any, *, is_lora: bool) -> None:
    """Raise ConfigRejected (`field_unsupported`) for a task that is not served, or is not served for this kind."""
    if value in (None, "CAUSAL_LM"):
        return
    if value not in HEADLESS_TASKS:
        way_out = (
            "This server serves CAUSAL_LM (text), SEQ_CLS (classes, scores), TOKEN_CLS (a class for each token) and "
            "FEATURE_EXTRACTION (vectors)."
        )
    elif not is_lora:
        way_out = "Adapters of that task are served where they are LoRA (peft_type LORA). Train it as one."
    else:
        return
    raise ConfigRejected("field_unsupported", "task_type", f"task_type is {str(value)[:40]!r}. {way_out}")


def check_bias(value: Any) -> None:
    """Raise ConfigRejected (`field_unsupported`) if biases of the base were trained."""
    if value not in (None, "none"):
        raise ConfigRejected(
            "field_unsupported", "bias", f"bias is {str(value)[:40]!r}; trained biases are not served. {_NO_BIAS}"
        )


def _check_initialisation(value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    name = str(value)[:40].lower()
    if name in _LEAVES_THE_BASE:
        return
    if name == "loftq":
        reason = f"init_lora_weights is 'loftq'. {_LOFTQ.reason} {_LOFTQ.way_out}"
        raise ConfigRejected("field_unsupported", "init_lora_weights", reason)
    if name.replace("-", "_").startswith(_CHANGES_THE_BASE):  # ms-swift writes lora-ga
        reason = f"init_lora_weights is {name!r}, which changes the base's own weights. {RESTORE}"
        raise ConfigRejected("field_unsupported", "init_lora_weights", reason)
    raise ConfigRejected(
        "field_unsupported",
        "init_lora_weights",
        f"init_lora_weights is {name!r}; known to leave the base alone are true, false, {', '.join(_LEAVES_THE_BASE)}.",
    )
