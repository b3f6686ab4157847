"""A LoRA in another spelling is rewritten to the files that PEFT 0.21 would have written for the served base.

Tensors of modules keep their values and get their new names. Experts that were separate linears are stacked as PEFT
stacks them for `target_parameters`: A by expert and then rank, B by rank and then expert. The pairs of gate and up
become one pair of both ranks. The B of this pair is block-diagonal, so its product is exactly the product of both.
Pairs of linears that the base joins (`joined`) are treated in the same way. The configuration names every module and
parameter, with its rank and scale, because patterns may have been written for the old names.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import torch

from loramux_adapters.base import BaseDescription, ParameterShape
from loramux_adapters.components import PREFIX
from loramux_adapters.config import LoraConfig, parse_adapter_config, parse_document
from loramux_adapters.errors import BaseMismatch, ConfigRejected, WeightsFileRejected, shown
from loramux_adapters.joined import HALVES
from loramux_adapters.matching import Match, TargetRules
from loramux_adapters.names import ALL, TensorNames, TensorPlace
from loramux_adapters.plan import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    PlanLimits,
    check_size,
    expert_holder,
    match_parameters,
    rank_and_scale,
    read_config_file,
)
from loramux_adapters.targets import match_guarded
from loramux_adapters.weights import DTYPES, read_tensor
from loramux_adapters.weights_file import ITEM_BYTES, SafetensorsHeader, build_header, read_header

Shape = tuple[int, ...]
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Renaming:
    """Result of a rewriting."""

    renamed: int
    """Tensors that got another name or were stacked."""
    dropped: int
    """Tensors of parts that never run here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is to be written."""

    dtype: str
    shape: Shape
    make: Callable[[BufferedReader], torch.Tensor]
    """Function that returns the tensor's values from the opened source file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One linear of one expert, or one part of a joined linear, in the form of the file."""

    part: int
    rank: int
    scale: float
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class _Stack:
    """All experts' pairs of one parameter, or those of a joined linear, which counts as one expert."""

    experts: Mapping[int, tuple[_Pair, ...]]
    """Pairs of each expert, in the order of their outputs."""

    @property
    def pairs(self) -> list[_Pair]:
        """The pairs of all experts."""
        return [pair for pairs in self.experts.values() for pair in pairs]

    @property
    def rank(self) -> int:
        """Rank of the joined pair of every expert; pairs with a lower rank are padded with zeros."""
        return max(sum(pair.rank for pair in pairs) for pairs in self.experts.values())

    @property
    def scale(self) -> float:
        """The scale of the first pair; the scales of other pairs are folded into their B."""
        return next(iter(self.experts.values()))[0].scale


def rename_adapter(folder: Path, into: Path, base: BaseDescription, limits: PlanLimits) -> Renaming | None:
    """Write to `into` the files that PEFT 0.21 would have written; return None if the names are already PEFT's.

    The result must still be validated. Raises AdapterRejected.
    """
    data = read_config_file(folder)
    document = parse_document(data)
    if document.get("peft_type") != "LORA":
        return None
    names, header = TensorNames(base), read_header(folder / WEIGHTS_NAME)
    if not names.are_other(header.tensors):
        return None
    config = parse_adapter_config(data)
    assert isinstance(config, LoraConfig), "its kind was asked above"
    places = {key: place for key in header.tensors if (place := names.read(key)) is not None}
    kept = {key: place for key, place in places.items() if place.place}
    parameters = match_parameters(config, base)
    holders = {match.module.rpartition(".")[0] for match in parameters}
    pairs = [place for place in kept.values() if place.tail.startswith("lora_") and place.stem not in holders]
    found = _matches(config, pairs, base)
    sizes = {module: rank_and_scale(match, config, limits) for module, match in found.items()}
    collected = _stacks(kept, header, config, sizes)
    stacks = {name: collected[name] for name in (*base.modules, *base.parameters) if name in collected}
    # Tensors with unknown names are not changed; validation names unexpected tensors.
    entries = {key: _copied(key, header) for key in header.tensors if key not in places}
    entries |= _linears({key: place for key, place in kept.items() if not place.is_share}, header)
    for name, stack in stacks.items():
        entries |= _stacked(name, stack, tuple(stacks), base, header)
    check_size(sum(entry.num_bytes for entry in entries.values()), limits)
    values = {place.place: sizes[place.module] for place in pairs if not place.is_share}
    values |= {match.module: rank_and_scale(match, config, limits) for match in parameters}
    values |= {name: (stack.rank, stack.scale) for name, stack in stacks.items()}
    written = {**document, **_targets(values, base)}
    (into / CONFIG_NAME).write_text(json.dumps(written, indent=2))
    with (folder / WEIGHTS_NAME).open("rb") as source:
        write_tensors(into / WEIGHTS_NAME, entries, source)
    renamed = sum(1 for key, place in kept.items() if place.key != key)
    return Renaming(renamed, len(places) - len(kept))


def write_tensors(path: Path, entries: Mapping[str, Entry], source: BufferedReader) -> None:
    """Write a safetensors file one tensor at a time, so that it is never in memory whole."""
    with path.open("wb") as file:
        file.write(build_header({name: (entry.dtype, entry.shape) for name, entry in entries.items()}))
        for name, entry in entries.items():
            tensor = entry.make(source).contiguous()
            assert tensor.shape == entry.shape, name
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


def _matches(config: LoraConfig, places: Iterable[TensorPlace], base: BaseDescription) -> dict[str, Match]:
    """Match the file's own names with the configuration, as when the adapter was trained.

    A name that does not match is tried again in its original form in the file, with wrappers. An item of a list of
    linears is also tried by the list's name.
    """
    written = {place.module: place.written for place in places}
    found: dict[str, Match] = {}
    for spelled in (lambda name: name, written.__getitem__, lambda name: re.sub(r"\.\d+$", "", name)):
        names = {name: spelled(name) for name in sorted(written) if name not in found}
        matches = {match.module: match for match in _match_names(config, sorted(set(names.values())))}
        found |= {name: matches[other]._replace(module=name) for name, other in names.items() if other in matches}
    head = base.vocabulary.head if base.vocabulary is not None and base.vocabulary.tied else None
    if config.ensure_weight_tying and head in written and head not in found:  # PEFT removes the head's name
        [found[head]] = match_guarded(_rules(config, (head,)), (head,))
    if unexpected := [name for name in sorted(written) if name not in found]:
        raise BaseMismatch(
            "tensors_unexpected",
            unexpected[0],
            f"The file has tensors of {len(unexpected)} modules that are no target of the configuration: "
            f"{shown(unexpected)}.",
        )
    return found


def _match_names(config: LoraConfig, names: Sequence[str]) -> list[Match]:
    if not names:
        return []
    rules = _rules(config, names if config.all_linear else config.target_modules)
    return match_guarded(
        rules._replace(
            exclude_modules=config.exclude_modules,
            layers_to_transform=config.layers_to_transform,
            layers_pattern=config.layers_pattern,
        ),
        names,
    )


def _rules(config: LoraConfig, targets: str | Sequence[str]) -> TargetRules:
    return TargetRules(targets, None, None, None, tuple(config.rank_pattern), tuple(config.alpha_pattern))


def _stacks(
    kept: Mapping[str, TensorPlace],
    header: SafetensorsHeader,
    config: LoraConfig,
    sizes: Mapping[str, tuple[int, float]],
) -> dict[str, _Stack]:
    """Collect shares by the base's parameter or linear; `sizes` are rank and scale by the module's name in the file."""
    keys: dict[tuple[str, int, int], dict[str, str]] = defaultdict(dict)
    modules: dict[tuple[str, int, int], str] = {}
    for key, place in kept.items():
        if place.is_share:
            share = (place.place, place.expert or 0, place.part)
            if place.tail in keys[share]:
                raise WeightsFileRejected("names_ambiguous", key, f"Two tensors of the file mean the same as {key}.")
            keys[share][place.tail] = key
            modules[share] = place.module
    if keys and (config.target_parameters or config.use_dora or config.lora_bias):
        field = next(name for name in ("target_parameters", "use_dora", "lora_bias") if getattr(config, name))
        raise ConfigRejected(
            "field_unsupported",
            field,
            f"{field} is set, and the file has pairs on single experts or on parts of a linear that the base joins: "
            "there it is not served. Train without one of them.",
        )
    experts: dict[str, dict[int, list[_Pair]]] = defaultdict(lambda: defaultdict(list))
    for (name, expert, part), tensors in sorted(keys.items()):
        rank, scale = sizes[modules[name, expert, part]]
        a, b = _both(tensors, modules[name, expert, part])
        _check_shapes(header, a, b, rank)
        experts[name][expert].append(_Pair(part, rank, scale, a, b))
    return {
        name: _Stack({expert: tuple(pairs) for expert, pairs in by_expert.items()})
        for name, by_expert in experts.items()
    }


def _both(tensors: Mapping[str, str], module: str) -> tuple[str, str]:
    if others := [key for tail, key in tensors.items() if tail not in ("lora_A.weight", "lora_B.weight")]:
        raise BaseMismatch(
            "tensors_unexpected",
            others[0],
            f"{others[0]} belongs to a part of what the base joins, of which pairs of A and B alone are served.",
        )
    for tail in ("lora_A.weight", "lora_B.weight"):
        if tail not in tensors:
            missing = f"{PREFIX}{module}.{tail}"
            raise BaseMismatch("tensors_missing", missing, f"The file has one tensor of the pair and not {missing}.")
    return tensors["lora_A.weight"], tensors["lora_B.weight"]


def _check_shapes(header: SafetensorsHeader, a: str, b: str, rank: int) -> None:
    for key, side in ((a, 0), (b, 1)):
        shape = header.tensors[key].shape
        if len(shape) != 2 or shape[side] != rank:
            raise BaseMismatch(
                "shape_mismatch", key, f"{key} is {list(shape)}; the configuration gives it rank {rank}."
            )


def _linears(kept: Mapping[str, TensorPlace], header: SafetensorsHeader) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, place in kept.items():
        if place.key in entries:
            raise WeightsFileRejected(
                "names_ambiguous", key, f"Two tensors of the file mean {place.key}; one of them is {key}."
            )
        entries[place.key] = _copied(key, header)
    return entries


def _copied(key: str, header: SafetensorsHeader) -> Entry:
    info = header.tensors[key]
    return Entry(info.dtype, info.shape, lambda source: read_tensor(source, info))


def _stacked(
    name: str, stack: _Stack, targeted: tuple[str, ...], base: BaseDescription, header: SafetensorsHeader
) -> dict[str, Entry]:
    """Make A and B of all experts of one parameter, or of one joined linear."""
    rank, shape = stack.rank, base.parameters.get(name)
    if shape is None:
        linear = base.modules[name]
        shape = ParameterShape(1, linear.in_features, linear.out_features, linear.layer)
    rows = {part: _rows(name, part, shape.out_features, base) for part in {pair.part for pair in stack.pairs}}
    for pair in stack.pairs:
        for key, expected in ((pair.a, (pair.rank, shape.in_features)), (pair.b, (len(rows[pair.part]), pair.rank))):
            if header.tensors[key].shape != expected:
                found = list(header.tensors[key].shape)
                raise BaseMismatch("shape_mismatch", key, f"{key} is {found}, expected {list(expected)}.")
    dtypes = {header.tensors[key].dtype for pair in stack.pairs for key in (pair.a, pair.b)}
    is_even = len({pair.scale for pair in stack.pairs}) == 1
    dtype = next(iter(dtypes)) if len(dtypes) == 1 and is_even else "F32"
    holder = f"{PREFIX}{expert_holder(name, targeted) if name in base.parameters else name}"

    def make_a(source: BufferedReader) -> torch.Tensor:
        a = torch.zeros(shape.num_experts, rank, shape.in_features, dtype=DTYPES[dtype])
        for expert, pairs in stack.experts.items():
            start = 0
            for pair in pairs:
                a[expert, start : start + pair.rank] = read_tensor(source, header.tensors[pair.a])
                start += pair.rank
        return a.flatten(0, 1)

    def make_b(source: BufferedReader) -> torch.Tensor:
        b = torch.zeros(shape.out_features, rank, shape.num_experts, dtype=DTYPES[dtype])
        for expert, pairs in stack.experts.items():
            start = 0
            for pair in pairs:
                factor = pair.scale / stack.scale if stack.scale else 1.0
                tensor = read_tensor(source, header.tensors[pair.b])
                b[rows[pair.part], start : start + pair.rank, expert] = tensor if is_even else tensor.float() * factor
                start += pair.rank
        return b.flatten(1)

    experts = shape.num_experts
    return {
        f"{holder}.lora_A.weight": Entry(dtype, (experts * rank, shape.in_features), make_a),
        f"{holder}.lora_B.weight": Entry(dtype, (shape.out_features, rank * experts), make_b),
    }


def _rows(name: str, part: int, out_features: int, base: BaseDescription) -> torch.Tensor:
    """Return the outputs of one part of a parameter or of a joined linear. Raises BaseMismatch (`shape_mismatch`)."""
    if part == ALL:
        return torch.arange(out_features)
    if name in base.parameters and base.alternates_gate_and_up:
        return torch.arange(part, out_features, 2)
    joined = HALVES if name in base.parameters else base.joined[name.rpartition(".")[2]]
    ranges = joined.rows(part, out_features)
    if ranges is None:
        raise BaseMismatch(
            "shape_mismatch",
            name,
            f"The base's {name} has {out_features} outputs, not as its config.json divides them.",
        )
    return torch.cat([torch.arange(one.start, one.stop) for one in ranges])


def _targets(values: Mapping[str, tuple[int, float]], base: BaseDescription) -> dict[str, Any]:
    """Return the fields of adapter_config.json that name the targets, from rank and scale by module or parameter."""
    # The router of a mixture was a linear, and its tensors' names are the same for a parameter.
    named = {f"{name}.weight" if f"{name}.weight" in base.parameters else name: value for name, value in values.items()}
    r, rank_pattern = compress_pattern({name: rank for name, (rank, _) in named.items()})
    alpha, alpha_pattern = compress_pattern({name: scale * rank for name, (rank, scale) in named.items()})
    return {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": [name for name in named if name not in base.parameters],
        "target_parameters": [name for name in base.parameters if name in named] or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def compress_pattern(values: Mapping[str, T]) -> tuple[T, dict[str, T]]:
    """Return the most common value, and the others: by the last part of the name if its modules agree, else by name."""
    common, _ = Counter(values.values()).most_common(1)[0]
    by_leaf: dict[str, set[T]] = defaultdict(set)
    for name, value in values.items():
        by_leaf[name.rpartition(".")[2]].add(value)
    pattern = {}
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if value != common:
            pattern[leaf if len(by_leaf[leaf]) == 1 else name] = value
    return common, pattern
