"""The fields of PEFT's LoraConfig (0.21.2) that this server does not serve: why, and how to convert.

Every other field is either read by config.py or named there as one that has no effect on a trained adapter. A field
listed here is refused only when it is switched on: null, false and empty values are what PEFT writes for "off".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loramux_adapters.errors import ConfigRejected


class Refusal(NamedTuple):
    """Why a field cannot be served, and the way out."""

    reason: str
    way_out: str


_TO_LORA = "Turn it into a LoRA with peft.save_as_lora(path, model, rank=...) and upload what that writes."
_RETRAIN = "Train the adapter without it."
_RESTORE = (
    "Save the adapter again with save_pretrained(..., path_initial_model_for_weight_conversion=<folder of the adapter "
    "as it was initialised>): PEFT then writes an ordinary LoRA for the unchanged base."
)
_NO_BIAS = "Train with bias='none'; lora_bias=true is served."

REFUSALS: Mapping[str, Refusal] = {
    "layer_replication": Refusal(
        "It builds a deeper model than the base that is served.", "Train on the base's own layers."
    ),
    "use_qalora": Refusal("QALoRA pools the inputs of a quantised base.", _RETRAIN),
    "loftq_config": Refusal("LoftQ replaces the base's weights by quantised ones.", _RETRAIN),
    "kasa_config": Refusal("KaSA truncates the base's weights and adds a diagonal between A and B.", _RETRAIN),
    "monteclora_config": Refusal("MonteCLoRA adds sampled perturbations to A.", _RETRAIN),
    "velora_config": Refusal(
        "VeLoRA stores a training buffer beside every pair.",
        "Its forward is plain LoRA's: delete the lora_velora_embed tensors and set velora_config to null.",
    ),
    "use_bdlora": Refusal(
        "BD-LoRA stores A or B as the blocks of a block-diagonal matrix.",
        "Write the blocks out into full matrices (torch.block_diag) and set use_bdlora to null.",
    ),
    "arrow_config": Refusal("Arrow routes between several adapters inside one.", "Upload the adapters singly."),
    "megatron_config": Refusal("Megatron's parallel layers are not those of the base that is served.", _RETRAIN),
}

_TRAIN_LORA = "Train a LoRA on the same data (peft.LoraConfig) and upload that."
_PROMPT = "It puts trained vectors before the prompt, where every request here has its own tokens only."
_TURNS = "It multiplies the base's weights, which requests for other adapters in the same batch share."
_WEIGHTS = "What it adds depends on the base's own weights, which an upload does not bring."
_DENSE = "What it adds to a weight has full rank, which no LoRA of a size that is served expresses exactly."
_SERVED = "LORA and IA3 are served, and other kinds that are turned into LORA at upload."
_ROUTES = "It chooses between several adapters inside one, token by token."

KINDS: Mapping[str, Refusal] = {
    "ADAMSS": Refusal(_WEIGHTS, _TRAIN_LORA),
    "ADAPTION_PROMPT": Refusal("It puts trained vectors into the attention of every layer.", _TRAIN_LORA),
    "BEFT": Refusal("It trains biases, which are not served.", _TRAIN_LORA),
    "BOFT": Refusal(_TURNS, _TRAIN_LORA),
    "CARTRIDGE": Refusal("It brings a KV cache of its own, computed elsewhere.", _TRAIN_LORA),
    "CPT": Refusal(_PROMPT, _TRAIN_LORA),
    "DEFT": Refusal(_WEIGHTS, _TRAIN_LORA),
    "FOURIERFT": Refusal(_DENSE, _TO_LORA),
    "FROD": Refusal(_WEIGHTS, _TRAIN_LORA),
    "GLORA": Refusal(_WEIGHTS, _TRAIN_LORA),
    "HIRA": Refusal(_WEIGHTS, _TRAIN_LORA),
    "HRA": Refusal(_TURNS, _TRAIN_LORA),
    "LILY": Refusal(_ROUTES, _TRAIN_LORA),
    "LN_TUNING": Refusal("It trains the base's norms, which are not served beside other adapters.", _TRAIN_LORA),
    "MULTITASK_PROMPT_TUNING": Refusal(_PROMPT, _TRAIN_LORA),
    "OFT": Refusal(_TURNS, _TRAIN_LORA),
    "OSF": Refusal("It splits the base's weights and trains a part of them.", _TRAIN_LORA),
    "PEANUT": Refusal(_WEIGHTS, _TRAIN_LORA),
    "POLY": Refusal(_ROUTES, _TRAIN_LORA),
    "PREFIX_TUNING": Refusal("It puts trained keys and values before every layer's own.", _TRAIN_LORA),
    "PROMPT_TUNING": Refusal(_PROMPT, _TRAIN_LORA),
    "PSOFT": Refusal(_WEIGHTS, _TO_LORA),
    "P_TUNING": Refusal(_PROMPT, _TRAIN_LORA),
    "ROAD": Refusal("It rotates the outputs of the base's linears.", _TRAIN_LORA),
    "SHADOW": Refusal("It brings a second network that runs beside the base.", _TRAIN_LORA),
    "SHIRA": Refusal("It changes single weights all over the matrix, which has full rank.", _TRAIN_LORA),
    "SUPERTUNING": Refusal("It changes single weights all over the matrix, which has full rank.", _TRAIN_LORA),
    "TINYLORA": Refusal(_WEIGHTS, _TO_LORA),
    "TRAINABLE_TOKENS": Refusal(
        "Trained rows of the embedding are served beside a LoRA.", "Train a LoRA with trainable_token_indices."
    ),
    "UNILORA": Refusal("Its file holds indices into one trained vector.", _TO_LORA),
    "WAVEFT": Refusal(_DENSE, _TO_LORA),
    "XLORA": Refusal(_ROUTES, "Upload the adapters singly."),
}
"""The kinds (`peft_type`) of PEFT 0.21.2 that are neither served nor turned into a LoRA (convert/forms.py)."""

CONVERTED = frozenset(
    ("ADALORA", "C3A", "DELORA", "GRALORA", "LOHA", "LOKR", "MISS", "PVERA", "RANDLORA", "VBLORA", "VERA")
)
"""The kinds that become a LoRA when they are uploaded (convert/forms.py)."""

_WITHOUT_ALORA = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
"""What PEFT applies to the tokens before the invocation too, or not at all, beside alora_invocation_tokens."""

_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LEAVES_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


def check_switched_off(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected (`field_unsupported`) for the first field of REFUSALS that is on."""
    for field, refusal in REFUSALS.items():
        if is_on(document.get(field)):
            raise ConfigRejected(
                "field_unsupported", field, f"{field} is set in adapter_config.json. {refusal.reason} {refusal.way_out}"
            )


def check_activation(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected (`field_unsupported`) for an activated LoRA that is not the base before its invocation."""
    if document.get("alora_invocation_tokens") is None:
        return
    for field in _WITHOUT_ALORA:
        if is_on(document.get(field)):
            raise ConfigRejected(
                "field_unsupported",
                field,
                f"{field} is set in adapter_config.json beside alora_invocation_tokens: what stands before the "
                f"invocation would not be the base's any more. Train without one of them.",
            )


def check_known(document: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ConfigRejected (`field_unknown`) for a field that no PEFT known here has, unless it is off."""
    for field, value in document.items():
        if field not in known and field not in REFUSALS and is_on(value):
            raise ConfigRejected(
                "field_unknown",
                field[:120],
                f"adapter_config.json has a field {field[:120]!r} that this server does not know (it knows those of "
                "PEFT 0.21.2) and therefore cannot promise to serve. Remove it if it has no effect on the trained "
                "weights, or save the adapter with PEFT 0.21.",
            )


def check_kind(document: Mapping[str, Any]) -> None:
    """Raise ConfigRejected unless the file is a LoRA or an IA3 for text generation that left the base as it was."""
    _check_peft_type(document.get("peft_type"))
    check_task_type(document.get("task_type"))
    check_bias(document.get("bias"))
    _check_initialisation(document.get("init_lora_weights", True))


def is_converted(document: Mapping[str, Any]) -> bool:
    """Whether it is of a kind that becomes a LoRA first."""
    kind = document.get("peft_type")
    return isinstance(kind, str) and kind in CONVERTED


def is_on(value: Any) -> bool:
    """Whether a value switches its field on. 0 does: a number that is not known is not known to be harmless."""
    return value is not None and value is not False and value not in ("", [], {})


def _check_peft_type(value: Any) -> None:
    if value in ("LORA", "IA3"):
        return
    if value is None:
        raise ConfigRejected("field_missing", "peft_type", "adapter_config.json has no peft_type; LORA is expected.")
    refusal = KINDS.get(value) if isinstance(value, str) else None
    reason, way_out = refusal or (_SERVED, _TO_LORA)
    raise ConfigRejected("peft_type_unsupported", "peft_type", f"peft_type is {str(value)[:40]!r}. {reason} {way_out}")


def check_task_type(value: Any) -> None:
    """Raise ConfigRejected (`field_unsupported`) for a model that does something else than generate text."""
    if value not in (None, "CAUSAL_LM"):
        raise ConfigRejected(
            "field_unsupported",
            "task_type",
            f"task_type is {str(value)[:40]!r}; this server generates text, which is CAUSAL_LM.",
        )


def check_bias(value: Any) -> None:
    """Raise ConfigRejected (`field_unsupported`) where biases of the base were trained."""
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
        reason = f"init_lora_weights is {name!r}, which changes the base's own weights. {_RESTORE}"
        raise ConfigRejected("field_unsupported", "init_lora_weights", reason)
    raise ConfigRejected(
        "field_unsupported",
        "init_lora_weights",
        f"init_lora_weights is {name!r}; known to leave the base alone are true, false, {', '.join(_LEAVES_THE_BASE)}.",
    )
