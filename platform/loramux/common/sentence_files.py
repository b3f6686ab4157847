"""sentence-transformers' files of a folder: how a text's hidden states become its vector.

`modules.json` lists the modules of a model in their order: Transformer, Pooling, any number of Dense, Normalize. A
Dense module is a linear with an activation, computed on the pooled vector. An adapter's folder and a base's may have
these files. Fields that are not served are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loramux.common.bundle import (
    LENGTH_FILE,
    MODEL_FILE,
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    SOURCES,
    VectorPooling,
)
from loramux.common.errors import Rejection

DENSE = "Dense"
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
"""Classes of torch.nn that a Dense module may have as its activation."""
_ORDER = ("Transformer", "Pooling", DENSE, "Normalize")
"""Kinds of modules that are served, in the order in which they are computed."""
_VECTOR = "sentence_embedding"
"""sentence-transformers' name of the pooled vector."""
_FOLDER = re.compile(r"\w[\w.-]{0,79}")
_FIELDS_BYTES = 64 << 10
"""The largest size of a Dense module's config.json."""
_POOLING: Mapping[str, VectorPooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names of the poolings that are served."""
FIRST_TOKEN = "the first token of a causal model has not seen the text"  # noqa: S105 - a sentence
_POOLING_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""Modes of older flags, if the flag's name is not `pooling_mode_` followed by the mode's name."""


class _Module(msgspec.Struct, kw_only=True):
    """An entry of modules.json."""

    path: str
    type: str

    @property
    def kind(self) -> str:
        """The class's name without its package."""
        return self.type.rpartition(".")[2]


Width = Annotated[int, Meta(ge=1, le=1 << 20)]


class Dense(msgspec.Struct, kw_only=True, frozen=True):
    """A linear with an activation that is computed on the pooled vector: `config.json` of its folder."""

    path: str
    in_features: Width
    out_features: Width
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = _VECTOR
    module_output_name: str = _VECTOR

    @property
    def activation(self) -> str:
        """Name of the activation's class in torch.nn."""
        return self.activation_function.rpartition(".")[2]

    @property
    def is_of_the_vector(self) -> bool:
        """True if the module reads the vector and replaces it."""
        return (self.module_input_name, self.module_output_name) == (_VECTOR, _VECTOR)

    @property
    def weights_file(self) -> str:
        """Name of the file with `linear.weight` and `linear.bias`, in the model's folder."""
        return f"{self.path}/model.safetensors"


class BundleRejected(Exception):
    """A file has a setting that cannot be served."""

    def __init__(self, file: str, message: str, code: str = "bundle_invalid") -> None:
        super().__init__(message)
        self.rejection = Rejection(code=code, field=file, message=f"{file}: {message}")


def sentence_pooling(folder: Path, *, is_encoder: bool) -> VectorPooling | None:
    """Return the pooling that sentence-transformers' files set; None without them. Raises BundleRejected."""
    modules = _modules(folder)
    kinds = [module.kind for module in modules]
    if unknown := next((kind for kind in kinds if kind not in _ORDER), None):
        raise BundleRejected(
            MODULES_FILE,
            f"It has a module {unknown[:80]!r}, which this server cannot do. Served are {', '.join(_ORDER[:-1])} and "
            f"{_ORDER[-1]}.",
            "field_unsupported",
        )
    once = [kind for kind in kinds if kind != DENSE]
    if sorted(kinds, key=_ORDER.index) != kinds or len(set(once)) < len(once):
        raise BundleRejected(
            MODULES_FILE,
            f"Its modules are {', '.join(kinds)[:200]}. Served are one Transformer, one Pooling, then any Dense "
            "modules, and one Normalize at the end.",
            "field_unsupported",
        )
    if any(module.kind == "Pooling" and module.path != "1_Pooling" for module in modules) or (
        "Pooling" in kinds and not (folder / POOLING_FILE).exists()
    ):
        path = next(module.path for module in modules if module.kind == "Pooling")
        raise BundleRejected(
            MODULES_FILE,
            f"It has a Pooling module in {path[:80]!r}, and what is read is {POOLING_FILE}. Upload that file under "
            "this name, with its folder.",
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


def refuse_dense(folder: Path, reason: str) -> None:
    """Raise BundleRejected, with the `reason`, if the folder's model has a Dense module."""
    if any(module.kind == DENSE for module in _modules(folder)):
        raise BundleRejected(MODULES_FILE, f"It has a module {DENSE!r}. {reason}", "field_unsupported")


def dense_modules(folder: Path) -> list[Dense]:
    """Return the Dense modules of a folder in their order. Raises BundleRejected."""
    return [_dense(folder, module.path) for module in _modules(folder) if module.kind == DENSE]


def _dense(folder: Path, path: str) -> Dense:
    if _FOLDER.fullmatch(path) is None:
        raise BundleRejected(MODULES_FILE, f"The path of a {DENSE} module, {path[:80]!r}, is no folder's name.")
    file = f"{path}/{MODEL_FILE}"
    fields = {name: value for name, value in read_object(folder, file).items() if value is not None}
    try:
        dense = msgspec.convert(fields | {"path": path}, Dense)
    except msgspec.ValidationError as error:
        raise BundleRejected(file, f"{error}.") from None
    if dense.activation not in ACTIVATIONS or not dense.is_of_the_vector:
        field = "module_input_name" if dense.activation in ACTIVATIONS else "activation_function"
        raise BundleRejected(
            file,
            f"{field} is not served as it is set. Served are {', '.join(ACTIVATIONS)}, computed on {_VECTOR}.",
            "field_unsupported",
        )
    if not (folder / dense.weights_file).is_file():
        raise BundleRejected(file, f"There is no {dense.weights_file}. Save the weights as safetensors.")
    return dense


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
    limit = SOURCES.get(name, _FIELDS_BYTES)
    try:
        with (folder / name).open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit:
        raise BundleRejected(name, f"The file has more than {limit} bytes.", "too_large")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BundleRejected(name, "The file is not UTF-8.") from None
