"""Fields and kinds of PEFT 0.21.2 that are not served: the reason, and the way out.

Every other field is either read by config.py or listed there as without effect on a trained adapter. A field listed
here is refused only when it is on: PEFT writes null, false or an empty value for "off".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loramux_adapters.errors import ConfigRejected


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

UNSUPPORTED_FIELDS: Mapping[str, Unsupported] = {
    "layer_replication": Unsupported(
        "It builds a deeper model than the base that is served.", "Train on the base's own layers."
    ),
    "use_qalora": Unsupported("QALoRA pools the inputs of a quantised base.", _RETRAIN),
    "loftq_config": Unsupported("LoftQ replaces the base's weights by quantised ones.", _RETRAIN),
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
"""Fields that PEFT, beside alora_invocation_tokens, applies to the tokens before the invocation too, or ignores."""

_OTHER_TASKS = ("SEQ_CLS", "FEATURE_EXTRACTION")
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
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

    PEFT itself ignores fields that it does not know. Here a field is ignored only where its value says nothing: what
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
    """Return the kind, or the initialisation, of an adapter that becomes a LoRA first; None of any other."""
    kind, first = document.get("peft_type"), document.get("init_lora_weights")
    if kind == "LORA" and isinstance(first, str) and (first == "pissa" or first.lower() == "olora"):
        return first.upper()
    return kind if isinstance(kind, str) and kind in CONVERTED else None


def is_on(value: Any) -> bool:
    """True if `value` switches its field on. 0 does: the meaning of an unknown number is unknown."""
    return value is not None and value is not False and value not in ("", [], {})


def _is_neutral(value: Any) -> bool:
    """True if a value of an unknown field says nothing: off, zero, "none", or an object of such values.

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
    """Raise ConfigRejected (`field_unsupported`) for a task that is not served, or not for adapters of this kind."""
    if value in (None, "CAUSAL_LM"):
        return
    if value not in _OTHER_TASKS:
        way_out = "This server serves CAUSAL_LM (text), SEQ_CLS (classes, scores) and FEATURE_EXTRACTION (vectors)."
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
    if name.startswith(_CHANGES_THE_BASE):
        reason = f"init_lora_weights is {name!r}, which changes the base's own weights. {RESTORE}"
        raise ConfigRejected("field_unsupported", "init_lora_weights", reason)
    raise ConfigRejected(
        "field_unsupported",
        "init_lora_weights",
        f"init_lora_weights is {name!r}; known to leave the base alone are true, false, {', '.join(_LEAVES_THE_BASE)}.",
    )
