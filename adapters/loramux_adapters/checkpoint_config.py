"""Refuse a checkpoint by its config.json alone: by its family, attention, rotary embeddings or quantization.

Every fact of config.json that decides whether a checkpoint is served is checked here, once. A start is refused by it
within a second, because this module loads neither torch nor transformers, whose import takes several. The engine
checks the same, then what transformers derives from the file, then the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from loramux_adapters.families import (
    ENCODERS,
    FAMILIES,
    FIXED_ROPES,
    MXFP4_FAMILIES,
    NOT_SERVED,
    encoder_of,
    family_of_text,
)

ROPE_ALIASES: Mapping[str, str] = {"mrope": "default", "su": "longrope"}
"""Names of rope types in older config.json files, which transformers renames when it reads them."""

QUANTIZATIONS = (
    "gptq of 4 or 8 bits, awq (gemm), bitsandbytes (nf4, fp4, int8), compressed-tensors (fp8, int8, pack-quantized "
    f"int4 and int8, mxfp4, nvfp4), fp8 in blocks, and {', '.join(MXFP4_FAMILIES)} in mxfp4"
)
"""Forms of quantized checkpoints that are served."""

SERVED = tuple(dict.fromkeys((*FAMILIES, *ENCODERS)))
"""Values of `model_type` that are served."""

PACKED_FLOATS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
"""Formats of compressed-tensors whose weights are floats of four bits."""

Fields = Mapping[str, Any]


def refusal_of_config(config: Fields) -> str | None:
    """Return why a checkpoint with this config.json is not served, with what is; None if the file allows it."""
    model_type = str(config.get("model_type"))
    if encoder_of(config) is not None:
        return _refusal_of_encoder(config)
    return (
        _refusal_of_family(model_type)
        or _refusal_of_text(model_type, str(_text_of(config).get("model_type", model_type)))
        or refusal_of_attention(config)
        or refusal_of_ropes(family_of_text(_text_of(config).get("model_type", model_type)).ropes, _rope_types(config))
        or refusal_of_quantization(config.get("quantization_config"), model_type)
    )


def _refusal_of_encoder(config: Fields) -> str | None:
    """Return why an encoder with this config.json is not served."""
    if config.get("is_decoder") or config.get("add_cross_attention"):
        return "config.json says is_decoder or add_cross_attention, and encoders are served as encoders alone."
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        return f"config.json's position_embedding_type = {kind!r} is not served; supported is absolute."
    if config.get("quantization_config"):
        return "the checkpoint is quantized, and encoders are served from weights of 16 or 32 bits."
    return refusal_of_ropes(FIXED_ROPES, _rope_types(config))


def is_classifier(config: Fields) -> bool:
    """Return whether a checkpoint with this config.json was saved with a head for classes of texts."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForSequenceClassification") for name in named)


def _refusal_of_family(model_type: str) -> str | None:
    if model_type in FAMILIES:
        return None
    if (reason := NOT_SERVED.get(model_type)) is not None:
        return f"model_type {model_type!r} is not served: {reason}; supported are {', '.join(sorted(SERVED))}."
    near = get_close_matches(model_type, SERVED, n=4, cutoff=0.6)
    nearest = f"; the nearest of the supported ones are {', '.join(near)}" if near else ""
    return (
        f"model_type {model_type!r} has not been shown to give the same tokens here as in transformers{nearest}; "
        f"supported are {', '.join(sorted(SERVED))}."
    )


def _refusal_of_text(model_type: str, text_type: str) -> str | None:
    """Return why a model of text and images is refused if its text is that of another family."""
    if text_type in (model_type, FAMILIES[model_type].text_type) or text_type in FAMILIES:
        return None
    return _refusal_of_family(text_type)


def refusal_of_attention(config: Fields) -> str | None:
    """Return why a checkpoint's attention is not served; None if it is causal."""
    parts = (config, _text_of(config))
    # "vision": later tokens are seen within an image alone, which the engine computes whole (ImageForm.sees_ahead).
    looks_ahead = any(part.get("use_bidirectional_attention") not in (None, False, "vision") for part in parts)
    if not looks_ahead and all(part.get("is_causal", True) is not False for part in parts):
        return None
    return (
        "config.json asks for attention that sees later tokens (use_bidirectional_attention or is_causal = false); "
        "generation needs causal attention, so give a checkpoint of a causal language model."
    )


def refusal_of_ropes(served: Iterable[str], found: Iterable[str]) -> str | None:
    """Return why the rope types `found` are not served; None if all of them are in `served`."""
    unserved = next((kind for kind in found if kind not in served), None)
    if unserved is None:
        return None
    return f"config.json's rope_type = {unserved!r} is not served; supported are {', '.join(sorted(served))}."


def refusal_of_quantization(quantization: Any, model_type: str | None = None) -> str | None:
    """Return why a checkpoint with this `quantization_config` is not served; None if it is, or is not quantized.

    A form is served if a test compares its answers with PEFT's. `model_type` is not checked if it is None.
    """
    if not quantization:
        return None
    method = _method_of(quantization)
    try:
        CHECKS[method](quantization)
        if method != "mxfp4" or model_type in (None, *MXFP4_FAMILIES):
            return None
        reason = f"quant_method {method!r} of a {model_type}"
    except KeyError:
        reason = f"quant_method {method!r}"
    except ValueError as error:
        reason = f"{method}: {error}"
    except (AttributeError, TypeError):
        reason = f"{method}: fields of another type"
    return (
        f"the checkpoint is quantized in a form that is not served ({reason}); served are {QUANTIZATIONS}. Give the "
        f"checkpoint that it was made from, with model.quantization if its weights take too much memory."
    )


def quant_method(quantization: Fields) -> str:
    """Return the method of a `quantization_config`; empty if it names none."""
    return str(quantization.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in quantization else ""))


def _method_of(quantization: Any) -> str:
    return quant_method(quantization) if isinstance(quantization, Mapping) else type(quantization).__name__


def _text_of(config: Fields) -> Fields:
    """Return the part of config.json about the text."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _rope_types(config: Fields) -> list[str]:
    """Return the rope types of each kind of layer by transformers' names of today."""
    text = _text_of(config)
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return []
    parts = [part for part in found.values() if isinstance(part, Mapping)] or [found]
    kinds = (str(part.get("rope_type") or part.get("type") or "default") for part in parts)
    return [ROPE_ALIASES.get(kind, kind) for kind in kinds]


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _check_gptq(fields: Fields) -> None:
    _require(fields.get("bits") in (4, 8), f"bits = {fields.get('bits', 0)}")
    form = fields.get("checkpoint_format") or "gptq"
    _require(form in ("gptq", "gptq_v2"), f"checkpoint_format = {form!r}")


def _check_awq(fields: Fields) -> None:
    bits, version = fields.get("bits", fields.get("w_bit")), str(fields.get("version", "gemm")).lower()
    _require(bits == 4, f"bits = {bits}")
    _require(version == "gemm", f"version = {version!r}")


def _check_bitsandbytes(fields: Fields) -> None:
    if fields.get("load_in_8bit"):
        return
    _require(bool(fields.get("load_in_4bit")), "neither load_in_4bit nor load_in_8bit")
    kind = fields.get("bnb_4bit_quant_type", "fp4")
    _require(kind in ("nf4", "fp4"), f"bnb_4bit_quant_type = {kind!r}")


def _check_compressed_tensors(fields: Fields) -> None:
    form = fields.get("format")
    forms = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *PACKED_FLOATS)
    _require(form in forms, f"format = {form!r}")
    _require(not fields.get("kv_cache_scheme"), "a kv_cache_scheme; engine.kv_cache_dtype is served")
    _require(not fields.get("transform_config"), "a transform_config")
    sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
    _require(sparsity == "dense", f"sparsity_config of format {sparsity!r}")
    schemes = schemes_of(fields)
    kinds = {(scheme.get("type"), scheme.get("num_bits")) for scheme in schemes}
    served = {("float", 4)} if form in PACKED_FLOATS else {("float", 8), ("int", 8), ("int", 4)}
    _require(kinds <= served, f"weights of {sorted(map(str, kinds))}")
    sizes = {scheme.get("group_size") for scheme in schemes}
    blocks = {tuple(scheme["block_structure"]) for scheme in schemes if scheme.get("block_structure")}
    _require(len(sizes) == 1 and len(blocks) <= 1, "config_groups of different group sizes")


def schemes_of(fields: Fields) -> list[Fields]:
    """Return the schemes of the weights in a `quantization_config` of compressed-tensors."""
    return [group.get("weights") or {} for group in (fields.get("config_groups") or {}).values()]


def _check_fp8(fields: Fields) -> None:
    block = fields.get("weight_block_size") or []
    _require(len(block) == 2, f"weight_block_size = {block}")
    kind = fields.get("fmt", "e4m3")
    _require(kind == "e4m3", f"fmt = {kind!r}")


CHECKS: Mapping[str, Callable[[Fields], None]] = {
    "gptq": _check_gptq,
    "awq": _check_awq,
    "bitsandbytes": _check_bitsandbytes,
    "compressed-tensors": _check_compressed_tensors,
    "fp8": _check_fp8,
    "mxfp4": lambda _fields: None,  # the fields only guide transformers' own loading
}
"""For each method of quantization a check of its fields, which raises ValueError with the one that is not served."""
