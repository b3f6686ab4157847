"""The files that say what a model was trained for: sentence-transformers' files, and a classifier's config.json.

An adapter's folder and a base's may have these files. Fields that are not served are refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from loramux.common.bundle import (
    LENGTH_FILE,
    MODEL_FILE,
    MODULES_FILE,
    NO_BUNDLE,
    POOLING_FILE,
    PROMPTS_FILE,
    SOURCES,
    Bundle,
    ProblemType,
    VectorPooling,
)
from loramux.common.errors import Rejection
from loramux_adapters.checkpoint_config import is_classifier
from loramux_adapters.families import ENCODERS

logger = logging.getLogger(__name__)


class ModelFields(msgspec.Struct, kw_only=True):
    """The fields of a classifier's config.json that are served."""

    id2label: dict[str, str] | None = None
    problem_type: ProblemType | None = None


class _Module(msgspec.Struct, kw_only=True):
    """An entry of modules.json."""

    path: str
    type: str


_POOLING: Mapping[str, VectorPooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names of the poolings that are served."""
FIRST_TOKEN = "the first token of a causal model has not seen the text"  # noqa: S105 - a sentence
_POOLING_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""Modes of older flags, if the flag's name is not `pooling_mode_` followed by the mode's name."""


class BundleRejected(Exception):
    """A file has a setting that cannot be served."""

    def __init__(self, file: str, message: str, code: str = "bundle_invalid") -> None:
        super().__init__(message)
        self.rejection = Rejection(code=code, field=file, message=f"{file}: {message}")


def is_encoder(model_dir: Path) -> bool:
    """Return whether the checkpoint in `model_dir` is an encoder."""
    return read_object(model_dir, MODEL_FILE).get("model_type") in ENCODERS


def bundle_of_base(model_dir: Path) -> Bundle:
    """Return the base's own task, if it generates no text, and its pooling. Raises BundleRejected.

    An encoder pools by the mean unless its files say otherwise, as sentence-transformers does. If another base's files
    ask for what is not served, its vectors are those of the last token.
    """
    if not is_encoder(model_dir):
        try:
            return Bundle(pooling=sentence_pooling(model_dir, is_encoder=False))
        except BundleRejected as rejected:
            logger.warning("vectors of the base in %s are those of the last token: %s", model_dir, rejected)
            return NO_BUNDLE
    config = of_model(model_dir)
    if not is_classifier(read_object(model_dir, MODEL_FILE)):
        pooling = sentence_pooling(model_dir, is_encoder=True) or "mean"
        return Bundle(task="FEATURE_EXTRACTION", pooling=pooling)
    labels = labels_of(config) or ("LABEL_0", "LABEL_1")
    return Bundle(task="SEQ_CLS", num_labels=len(labels), labels=labels, problem_type=config.problem_type)


def sentence_pooling(folder: Path, *, is_encoder: bool) -> VectorPooling | None:
    """Return the pooling that sentence-transformers' files set; None without them. Raises BundleRejected."""
    modules = _modules(folder)
    for module in modules:
        kind = module.type.rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise BundleRejected(
                MODULES_FILE,
                f"It has a module {kind[:80]!r}, which this server cannot do. Served are Transformer, Pooling and "
                "Normalize.",
                "field_unsupported",
            )
        if kind == "Pooling" and (module.path != "1_Pooling" or not (folder / POOLING_FILE).exists()):
            raise BundleRejected(
                MODULES_FILE,
                f"It has a Pooling module in {module.path[:80]!r}, and what is read is {POOLING_FILE}. Upload that "
                "file under this name, with its folder.",
            )
    if default := read_object(folder, PROMPTS_FILE).get("default_prompt_name"):
        raise BundleRejected(
            PROMPTS_FILE,
            f"default_prompt_name is {str(default)[:80]!r}, and no prompt is put before texts here. Set it to null, "
            "and send the prompt with each text.",
            "field_unsupported",
        )
    if read_object(folder, LENGTH_FILE).get("do_lower_case"):
        raise BundleRejected(LENGTH_FILE, "do_lower_case is not served: texts are read as sent.", "field_unsupported")
    return _pooling_mode(read_object(folder, POOLING_FILE), is_encoder=is_encoder)


def _modules(folder: Path) -> list[_Module]:
    if (text := read_text(folder, MODULES_FILE)) is None:
        return []
    try:
        return msgspec.json.decode(text, type=list[_Module])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleRejected(MODULES_FILE, f"{error}.") from None


def _pooling_mode(config: Mapping[str, Any], *, is_encoder: bool) -> VectorPooling | None:
    """Return the only mode of a pooling module, in the notation of older or newer versions. Raises BundleRejected."""
    if not config:
        return None
    given = config.get("pooling_mode")
    flags = [field for field, value in config.items() if field.startswith("pooling_mode_") and value]
    old = [_POOLING_FLAGS.get(field, field.removeprefix("pooling_mode_")) for field in flags]
    modes = old if given is None else given if isinstance(given, list) else [given]
    served = [mode for mode in _POOLING if is_encoder or mode != "cls"]
    if len(modes) != 1 or modes[0] not in served:
        why = "" if is_encoder else f": {FIRST_TOKEN}"
        raise BundleRejected(
            POOLING_FILE,
            f"It pools by {', '.join(map(str, modes))[:200] or 'nothing'}. Served is one of {', '.join(served)}{why}. "
            "Train with one of them.",
            "field_unsupported",
        )
    if modes == ["mean"] and config.get("include_prompt") is False:
        raise BundleRejected(
            POOLING_FILE,
            "include_prompt is false: the mean here is that of all tokens. Train with include_prompt=True.",
            "field_unsupported",
        )
    return _POOLING[modes[0]]


def of_model(folder: Path) -> ModelFields:
    """Read a classifier's config.json. Raises BundleRejected."""
    document = read_object(folder, MODEL_FILE)
    try:
        return msgspec.convert({name: document.get(name) for name in ModelFields.__struct_fields__}, ModelFields)
    except msgspec.ValidationError as error:
        raise BundleRejected(MODEL_FILE, f"{error}.") from None


def labels_of(config: ModelFields) -> tuple[str, ...]:
    """Return the names of `id2label`, in order. Raises BundleRejected."""
    names = config.id2label or {}
    try:
        named = {int(number): name for number, name in names.items()}
    except ValueError:
        raise BundleRejected(MODEL_FILE, "id2label has a key that is no number.") from None
    if sorted(named) != list(range(len(named))):
        raise BundleRejected(MODEL_FILE, "id2label does not number its labels from 0 on.")
    return tuple(named[number] for number in range(len(named)))


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of bounded size; empty without the file. Raises BundleRejected."""
    if (text := read_text(folder, name)) is None:
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleRejected(name, f"This is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise BundleRejected(name, "This is not a JSON object.")
    return document


def read_text(folder: Path, name: str) -> str | None:
    """Read a file of bounded size; None without it. Raises BundleRejected."""
    try:
        with (folder / name).open("rb") as file:
            data = file.read(SOURCES[name] + 1)
    except FileNotFoundError:
        return None
    if len(data) > SOURCES[name]:
        raise BundleRejected(name, f"The file has more than {SOURCES[name]} bytes.", "too_large")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BundleRejected(name, "The file is not UTF-8.") from None
