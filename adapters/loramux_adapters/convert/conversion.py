"""From a folder with an adapter of another kind to a folder with the LoRA that computes the same.

Every kind here changes a linear's weight by a product of two matrices that its own algebra gives, so that nothing is
fitted or cut off: float64 in between, one rounding to float32 at the end. Memory: the tensors that all linears share,
and those of one linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loramux_adapters.base import BaseDescription, LinearShape
from loramux_adapters.config import parse_document, read_fields
from loramux_adapters.convert.form import Factors, Form, Pair, Shape, Tensors, folded
from loramux_adapters.convert.forms import FORMS, known_fields
from loramux_adapters.convert.writing import PlainLora, write_lora
from loramux_adapters.errors import ConfigRejected, WeightsFileRejected
from loramux_adapters.expected import check_tensors
from loramux_adapters.finite import check_finite
from loramux_adapters.header import SafetensorsHeader, read_header
from loramux_adapters.matching import Match
from loramux_adapters.parts import PREFIX
from loramux_adapters.plan import Limits
from loramux_adapters.refusals import check_bias, check_task_type, is_converted, is_on
from loramux_adapters.targets import check_linears, context, match_targets
from loramux_adapters.tensors import read_tensor
from loramux_adapters.validate import WEIGHTS_NAME, read_config_file

MAX_SHARED_BYTES = 64 << 20
MAX_TENSOR_BYTES = 32 << 20
"""Of one tensor that belongs to one linear."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was converted."""

    peft_type: str
    """PEFT's name for the kind that it was."""
    max_rank: int
    """The largest rank of the LoRA that it became."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """One adapted linear of the base."""

    module: str
    shape: LinearShape
    factors: Factors

    @property
    def rank(self) -> int:
        """That of the pair that is written: no more than the smaller side."""
        return min(self.factors.rank, self.shape.in_features, self.shape.out_features)

    def key(self, tensor: str) -> str:
        """A tensor's name in the file."""
        return f"{PREFIX}{self.module}.{tensor}"

    def copies(self, header: SafetensorsHeader) -> dict[str, str]:
        """Copies of shared tensors that the file holds for this linear, and the names of the originals."""
        named = {self.key(copy): original for copy, original in self.factors.copies.items()}
        return {copy: original for copy, original in named.items() if copy in header.tensors}


def convert_adapter(folder: Path, into: Path, base: BaseDescription, limits: Limits) -> Conversion | None:
    """Write into `into` the LoRA that computes what the adapter in `folder` does; None where there is nothing to do.

    None: it is a LoRA already, or of a kind that is not converted, which validation serves or refuses by name. What is
    written is float32 and still to be validated as any other. Raises AdapterRejected: as parse_adapter_config,
    read_header, check_finite and plan_adapter do, and `rank_too_large` where the exact LoRA is too large for `limits`.
    """
    document = parse_document(read_config_file(folder))
    if not is_converted(document):
        return None
    peft_type = document["peft_type"]
    config = _read(document, peft_type)
    matches = match_targets(config, base, config.rank_keys, config.alpha_keys)
    check_linears(matches, base)
    linears = [_linear(config, match, base.modules[match.module]) for match in matches]
    header = read_header(folder / WEIGHTS_NAME)
    shared = config.shared([linear.shape for linear in linears])
    _check_file(shared, linears, header, limits, context(base, config.base_model_name_or_path))
    _check_ranks(linears, peft_type, limits)
    check_finite(folder / WEIGHTS_NAME, header)
    kept = [linear for linear in linears if linear.rank]
    plain = PlainLora({linear.module: (linear.rank, linear.shape) for linear in kept}, config.base_model_name_or_path)
    _check_size(plain.num_bytes, limits)
    write_lora(into, plain, _pairs(folder / WEIGHTS_NAME, header, shared, kept))
    return Conversion(peft_type, plain.max_rank)


def _read(document: Mapping[str, Any], peft_type: str) -> Form:
    form = FORMS[peft_type]
    check_task_type(document.get("task_type"))
    check_bias(document.get("bias"))
    known = known_fields(form)
    for field, value in document.items():
        if is_on(value) and (field in form.REFUSED or field not in known):
            way_out = form.REFUSED.get(field, "Train the adapter without it, or remove it if it has no effect.")
            raise ConfigRejected(
                "field_unsupported",
                field[:120],
                f"{field[:120]!r} is set in adapter_config.json, with which a {peft_type} cannot be turned into the "
                f"LoRA that would be served. {way_out}",
            )
    return read_fields(document, form)


def _linear(config: Form, match: Match, shape: LinearShape) -> _Linear:
    return _Linear(match.module, shape, config.factors(match, shape))


def _check_file(
    shared: Mapping[str, Shape], linears: list[_Linear], header: SafetensorsHeader, limits: Limits, where: str
) -> None:
    _check_size(header.file_bytes, limits)
    own = {linear.key(name): shape for linear in linears for name, shape in linear.factors.shapes.items()}
    copies = {copy: shared[original] for linear in linears for copy, original in linear.copies(header).items()}
    check_tensors({**shared, **own, **copies}, header, where)
    sizes = {name: tensor.end - tensor.start for name, tensor in header.tensors.items()}
    if sum(sizes[name] for name in shared) > MAX_SHARED_BYTES:
        raise WeightsFileRejected(
            "weights_too_large",
            next(iter(shared)),
            f"What all modules share, {', '.join(shared)}, is larger than {MAX_SHARED_BYTES} bytes.",
        )
    if too_large := [name for name in own if sizes[name] > MAX_TENSOR_BYTES]:
        raise WeightsFileRejected(
            "weights_too_large", too_large[0], f"{too_large[0]} is larger than {MAX_TENSOR_BYTES} bytes."
        )


def _check_size(num_bytes: int, limits: Limits) -> None:
    if num_bytes > limits.max_bytes:
        raise WeightsFileRejected(
            "weights_too_large",
            None,
            f"The weights have {num_bytes} bytes, as they are or as the LoRA that would be served; "
            f"{limits.max_bytes} are taken.",
        )


def _check_ranks(linears: list[_Linear], peft_type: str, limits: Limits) -> None:
    worst = max(linears, key=lambda linear: linear.rank)
    if worst.rank == 0:
        raise ConfigRejected(
            "rank_pattern_empty", "rank_pattern", "rank_pattern leaves no module a rank: nothing to serve."
        )
    if worst.rank > limits.max_rank:
        raise ConfigRejected(
            "rank_too_large",
            "peft_type",
            f"A {peft_type} is served as the LoRA that computes exactly the same; here that has rank {worst.rank} at "
            f"{worst.module}, and this server takes up to {limits.max_rank}. Train a smaller one, or make a LoRA "
            f"that comes close with peft.save_as_lora(path, model, rank={limits.max_rank}) and upload that.",
        )


def _pairs(
    path: Path, header: SafetensorsHeader, shared: Mapping[str, Shape], linears: list[_Linear]
) -> Iterator[tuple[str, Pair]]:
    """Every module with its pair, one at a time."""
    with path.open("rb") as file:

        def read(name: str) -> torch.Tensor:
            return read_tensor(file, header.tensors[name]).double()

        common = {name: read(name) for name in shared}
        for linear in linears:
            for copy, original in linear.copies(header).items():
                _check_copy(copy, read(copy), original, common[original])
            own = {name: read(linear.key(name)) for name in linear.factors.shapes}
            yield linear.module, _pair(linear, common | own)


def _check_copy(copy: str, tensor: torch.Tensor, original: str, shared: torch.Tensor) -> None:
    if not torch.equal(tensor, shared):
        raise WeightsFileRejected("copy_differs", copy, f"{copy} must equal {original}, which all modules share.")


def _pair(linear: _Linear, tensors: Tensors) -> Pair:
    pair = linear.factors.pair(tensors)
    return folded(pair) if linear.rank < linear.factors.rank else pair
