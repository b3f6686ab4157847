"""Names of a LoRA's tensors in other spellings than PEFT 0.21 writes for the served base, and where they belong.

- `lora_A.default.weight`: the adapter's name in the tensor's, as state dicts of a wrapped model have it.
- `model.language_model.layers...` or `language_model.model.layers...`: trained on a multimodal checkpoint whose text
  model is served here, or the other way round. Parts for other inputs than text (`vision_tower`, ...) never run here.
- `layers...` without `model.`: trained on the model without its head, as adapters of task type FEATURE_EXTRACTION are.
- `mlp.experts.3.gate_proj`, `block_sparse_moe.experts.3.w1`: experts as linears of their own, as transformers 4 had
  them; transformers 5 stacks them in parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from loramux_adapters.base import BaseDescription
from loramux_adapters.components import PREFIX

GATE_UP, DOWN = "gate_up_proj", "down_proj"

_TAIL = re.compile(
    r"(?P<module>.+)\.(?P<tensor>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save)"
    r"(?P<rest>(?:\.[^.]+){0,2})"
)
_WHOLE = re.compile(r"(?P<module>.+?)\.(?P<tail>(?:base_layer\.|original_module\.)?(?:weight|bias)|token_adapter\..+)")
_EXPERT = re.compile(r"(?P<mixture>.+)\.experts\.(?P<expert>\d{1,5})\.(?P<linear>w[123]|(?:gate|up|down)_proj)")
_HALVES = {"w1": (GATE_UP, 0), "gate_proj": (GATE_UP, 0), "w3": (GATE_UP, 1), "up_proj": (GATE_UP, 1)}
"""Parameter of transformers 5 and the half of its outputs, or where gate and up take turns every second one; the other
two linears are the down projection."""
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("", "language_model."),
    ("", "model."),
    ("", "transformer."),
)
_OTHER_INPUTS = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\..+")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one tensor of an adapter file in the base model."""

    module: str
    """The module's name in the file, by which patterns of the configuration mean it."""
    place: str
    """The base's module; of an expert's linear, the base's parameter; empty for parts that never run here."""
    tail: str
    """PEFT's name of the tensor after the module's, such as `lora_A.weight`."""
    expert: int | None = None
    half: int = 0
    """The half of the outputs of a `gate_up_proj`, or every second of them: 0 is the gate's, 1 is up's."""

    @property
    def stem(self) -> str:
        """The base's module without PEFT's wrappers around it."""
        return self.place.partition(".base_layer")[0]

    @property
    def key(self) -> str:
        """The name that PEFT 0.21 writes; of an expert's linear there is none of its own."""
        return f"{PREFIX}{self.place}.{self.tail}"


class TensorNames:
    """Reads the names of a file's tensors for one base."""

    def __init__(self, base: BaseDescription) -> None:
        self._base = base

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(self._base.names)

    def are_other(self, keys: Iterable[str]) -> bool:
        """True if any of `keys` is spelled otherwise than PEFT 0.21 spells it for this base."""
        return any((place := self.read(key)) is not None and place.key != key for key in keys)

    def read(self, key: str) -> TensorPlace | None:
        """Say where a tensor belongs; None where its name says nothing that is known here."""
        if not key.startswith(PREFIX) or (parts := _split(key.removeprefix(PREFIX))) is None:
            return None
        module, tail = parts
        if (expert := _EXPERT.fullmatch(module)) is not None and module not in self._modules:
            return self._of_expert(module, expert, tail)
        stem = module
        while stem not in self._modules and stem.endswith(".base_layer"):  # of a mixture with two parameters
            stem = stem.removesuffix(".base_layer")
        place = self._renamed(stem, self._modules)
        if place is None:
            return TensorPlace(module, "", tail) if _OTHER_INPUTS.fullmatch(module) else None
        return TensorPlace(module, place + module.removeprefix(stem), tail)

    def _of_expert(self, module: str, match: re.Match[str], tail: str) -> TensorPlace | None:
        leaf, half = _HALVES.get(match["linear"], (DOWN, 0))
        parameter = self._renamed(f"{match['mixture']}.experts.{leaf}", self._base.parameters)
        expert = int(match["expert"])
        if parameter is None or expert >= self._base.parameters[parameter].num_experts:
            return None
        return TensorPlace(module, parameter, tail, expert, half)

    def _renamed(self, name: str, known: Collection[str]) -> str | None:
        """Return the name among `known` that means the same, in another transformers or in a multimodal model."""
        name = name.replace(".block_sparse_moe.", ".mlp.") if name not in known else name
        if name in known:
            return name
        candidates = (new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old))
        return next((candidate for candidate in candidates if candidate in known), None)


def _split(name: str) -> tuple[str, str] | None:
    """Split a tensor's name into that of its module and PEFT's own name for the tensor."""
    if (match := _TAIL.fullmatch(name)) is not None:
        tail = _canonical_tail(match["tensor"], match["rest"].split(".")[1:])
        return None if tail is None else (match["module"], tail)
    match = _WHOLE.fullmatch(name)
    return None if match is None else (match["module"], match["tail"])


def _canonical_tail(tensor: str, rest: list[str]) -> str | None:
    """Return the tensor's name without the adapter's; None where it has another form."""
    leaf = rest.pop() if rest and rest[-1] in ("weight", "bias") else ""
    if len(rest) > 1:
        return None
    if tensor == "modules_to_save":
        return leaf if rest and leaf else None  # without the adapter's name it is a copy of its own
    if tensor in ("lora_A", "lora_B"):
        return f"{tensor}.{leaf}" if leaf else None
    return None if leaf == "bias" else tensor
