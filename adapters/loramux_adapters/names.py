"""Names of a LoRA's tensors in other spellings than PEFT 0.21's for the served base, and the places that they mean.

- `lora_A.default.weight`: the adapter's name is in the tensor's name, as in state dicts of a wrapped model.
- `model.language_model.layers...` or `language_model.model.layers...`: trained on a multimodal checkpoint whose text
  model is served here, or the reverse. Parts for other inputs than text (`vision_tower`, ...) are not used if
  the base lacks them.
- `layers...` without `model.`: trained on the model without its head, as adapters of task type FEATURE_EXTRACTION are.
    The same for an encoder, whose pooler runs only for classes, if at all.
- `k_proj`, `v_proj` of a layer that reads the keys and values of an earlier layer: older versions of transformers have
    these linears and never call them, so they are not used here either.
- `mlp.experts.3.gate_proj`, `block_sparse_moe.experts.3.w1`, `mlp.experts.gate_up_projs.3`: experts as separate
  linears, as in transformers 4 and unsloth; transformers 5 stacks them in parameters.
- `self_attn.q_proj` of a base with `qkv_proj`, `linear_attn.in_proj_q` of one with `in_proj_qkv`: parts of a linear
  that the base joins.
- `_orig_mod`, `_fsdp_wrapped_module`, `module`, ... within or before the name: modules that torch puts around others.
  Names without PEFT's `base_model.model.`, or with it twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from loramux_adapters.base import BaseDescription
from loramux_adapters.components import PREFIX
from loramux_adapters.families import reads_other_inputs

GATE_UP, DOWN = "gate_up_proj", "down_proj"

_TAIL = re.compile(
    r"(?P<module>.+)\.(?P<tensor>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save"
    r"|token_adapter\.trainable_tokens_delta)(?P<rest>(?:\.[^.]+){0,2})"
)
_WHOLE = re.compile(r"(?P<module>.+?)\.(?P<tail>(?:base_layer\.|original_module\.)?(?:weight|bias)|token_adapter\..+)")
_EXPERT = re.compile(
    r"(?P<mixture>.+)\.experts\."
    r"(?:(?P<expert>\d{1,5})\.(?P<linear>w[123]|(?:gate|up|down|gate_up)_proj)"
    r"|(?P<list>(?:gate|up|down|gate_up)_proj)s\.(?P<item>\d{1,5}))"
)
ALL = -1
"""The `part` of a TensorPlace that has all outputs."""
_PARTS = {
    **{"w1": (GATE_UP, 0), "gate_proj": (GATE_UP, 0), "w3": (GATE_UP, 1), "up_proj": (GATE_UP, 1)},
    GATE_UP: (GATE_UP, ALL),
}
"""Parameter of transformers 5 and the part of its outputs: 0 is the part of the gate, 1 the part of up. The other
linears are the down projection.
"""
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))
"""Names under which torch.compile, FSDP, checkpointing and Lightning hold the module that they wrap."""
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("backbone.", "model."),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("", "language_model."),
    ("", "model."),
    ("", "transformer."),
)

UNUSED_POOLERS = frozenset(("pooler.dense",))
"""Linears that transformers adds to encoders whose head does not read them."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of one tensor of an adapter file in the base model."""

    module: str
    """The module's name in the file without wrappers; patterns of the configuration use this name."""
    place: str
    """The base's module, or the base's parameter for an expert's linear; empty for parts that never run here."""
    tail: str
    """PEFT's name of the tensor after the module's, such as `lora_A.weight`."""
    expert: int | None = None
    part: int = ALL
    """Index of the tensor's part among the parts that the base joins: the gate's or up's outputs of an expert, or one
    of `JoinedLinear.parts`.
    """
    written: str = ""
    """The module's name in the file."""

    @property
    def is_share(self) -> bool:
        """True if the tensor is a share of a tensor that PEFT writes for the base."""
        return self.expert is not None or self.part != ALL

    @property
    def stem(self) -> str:
        """The base's module without PEFT's wrappers around it."""
        return self.place.partition(".base_layer")[0]

    @property
    def key(self) -> str:
        """The name that PEFT 0.21 writes; for a share, the name of the whole tensor."""
        return f"{PREFIX}{self.place}.{self.tail}"


class TensorNames:
    """Reads the names of a file's tensors for one base."""

    def __init__(self, base: BaseDescription) -> None:
        self._base = base

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(self._base.names)

    @cached_property
    def _has_tower(self) -> bool:
        return any(map(reads_other_inputs, self._base.names))

    def are_other(self, keys: Iterable[str]) -> bool:
        """True if any of `keys` is spelled otherwise than PEFT 0.21 spells it for this base."""
        return any((place := self.read(key)) is not None and place.key != key for key in keys)

    def read(self, key: str) -> TensorPlace | None:
        """Return the place of a tensor; None if its name is unknown."""
        if (parts := _split(unwrapped(key))) is None:
            return None
        place = self._place(*parts)
        if place is None:
            return None
        split = _split(key.removeprefix(PREFIX))
        return replace(place, written=split[0] if split else place.module)

    def _place(self, module: str, tail: str) -> TensorPlace | None:
        if (expert := _EXPERT.fullmatch(module)) is not None and module not in self._modules:
            return self._of_expert(module, expert, tail)
        stem = module
        while stem not in self._modules and stem.endswith(".base_layer"):  # the base has a mixture with two parameters
            stem = stem.removesuffix(".base_layer")
        place = self._renamed(stem, self._modules)
        if place is None and (part := self._of_joined(module, tail)) is not None:
            return part
        if place is None:
            is_of_absent_tower = reads_other_inputs(module) and not self._has_tower
            never_runs = is_of_absent_tower or self._is_of_shared_kv(module)
            never_runs |= self._base.encoder is not None and module in UNUSED_POOLERS
            return TensorPlace(module, "", tail) if never_runs else None
        return TensorPlace(module, place + module.removeprefix(stem), tail)

    def _of_expert(self, module: str, match: re.Match[str], tail: str) -> TensorPlace | None:
        written = match["linear"] or match["list"]
        leaf, part = _PARTS.get(written, (DOWN, ALL))
        parameter = self._renamed(f"{match['mixture']}.experts.{leaf}", self._base.parameters)
        if parameter is None:  # experts without a gate
            part = ALL
            parameter = self._renamed(f"{match['mixture']}.experts.{written}", self._base.parameters)
        expert = int(match["expert"] or match["item"])
        if parameter is None or expert >= self._base.parameters[parameter].num_experts:
            return None
        return TensorPlace(module, parameter, tail, expert, part)

    def _of_joined(self, module: str, tail: str) -> TensorPlace | None:
        parent, _, leaf = module.rpartition(".")
        for joined, linear in self._base.joined.items():
            if leaf in linear.parts and (place := self._renamed(f"{parent}.{joined}", self._base.modules)) is not None:
                return TensorPlace(module, place, tail, part=linear.parts.index(leaf))
        return None

    def _is_of_shared_kv(self, module: str) -> bool:
        """True if `module` would make the keys or values of a layer whose attention only has queries and an output."""
        parent, _, leaf = module.rpartition(".")
        if leaf not in ("k_proj", "v_proj") or (query := self._renamed(f"{parent}.q_proj", self._base.modules)) is None:
            return False
        attention = query.removesuffix("q_proj")
        return {n for n in self._base.modules if n.startswith(attention)} == {query, f"{attention}o_proj"}

    def _renamed(self, name: str, known: Collection[str]) -> str | None:
        """Return the name among `known` that means the same, in another transformers or in a multimodal model."""
        if name not in known:
            # unsloth's router of gpt-oss holds a linear
            name = re.sub(r"\.router\.linear$", ".router", name.replace(".block_sparse_moe.", ".mlp."))
        if name in known:
            return name
        encoder = self._base.encoder
        prefixes = _PREFIXES if encoder is None else (*_PREFIXES, ("", f"{encoder.body}."))
        candidates = (new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))
        return next((candidate for candidate in candidates if candidate in known), None)


def unwrapped(key: str) -> str:
    """Return a tensor's name without PEFT's prefix, and without the modules that wrap others."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    starts = [at + 2 for at in range(len(parts) - 1) if parts[at : at + 2] == ["base_model", "model"]]
    parts = parts[max(starts, default=0) :]
    while parts[0] == "module" and len(parts) > 1:  # of DistributedDataParallel
        parts = parts[1:]
    return ".".join(parts)


def _split(name: str) -> tuple[str, str] | None:
    """Split a tensor's name into that of its module and PEFT's own name for the tensor."""
    if (match := _TAIL.fullmatch(name)) is not None:
        tail = _canonical_tail(match["tensor"], match["rest"].split(".")[1:])
        return None if tail is None else (match["module"], tail)
    match = _WHOLE.fullmatch(name)
    return None if match is None else (match["module"], match["tail"])


def _canonical_tail(tensor: str, rest: list[str]) -> str | None:
    """Return the tensor's name without the adapter's; None if it has another form."""
    leaf = rest.pop() if rest and rest[-1] in ("weight", "bias") else ""
    if len(rest) > 1:
        return None
    if tensor == "modules_to_save":
        return leaf if rest and leaf else None  # without the adapter's name, the tensor is a separate copy
    if tensor in ("lora_A", "lora_B"):
        return f"{tensor}.{leaf}" if leaf else None
    return None if leaf == "bias" else tensor
