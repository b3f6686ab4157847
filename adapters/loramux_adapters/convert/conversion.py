"""Conversion of a folder with an adapter of another kind to a folder with an equivalent LoRA.

Every convertible kind changes a linear's weight by a product of two matrices. The kind's own algebra gives these
matrices (some kinds also need the base's weight), so nothing is fitted or truncated. The matrices are computed in
float64 and rounded once, to float32, at the end. Memory holds the tensors that all linears share, and the tensors of
one linear. The result is written tensor by tensor, so the whole result is never in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loramux_adapters.base import BaseDescription, LinearShape
from loramux_adapters.components import PREFIX
from loramux_adapters.config import check_bias, check_task_type, converted_kind, is_on, parse_document, read_fields
from loramux_adapters.convert.base_dependent import Boft, Hra, Oft, Olora, Pissa
from loramux_adapters.convert.kind import BASE_WEIGHT, ConvertibleKind, Factors, Pair, Shape, Tensors, folded
from loramux_adapters.convert.renaming import compress_pattern
from loramux_adapters.convert.self_contained import (
    AdaLora,
    C3a,
    DeLora,
    GraLora,
    LoHa,
    LoKr,
    Miss,
    Pvera,
    RandLora,
    VbLora,
    Vera,
)
from loramux_adapters.errors import ConfigRejected, WeightsFileRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, check_size, read_config_file
from loramux_adapters.targets import check_linears, check_tensors, describe_context, match_targets
from loramux_adapters.weights import read_tensor
from loramux_adapters.weights_file import ITEM_BYTES, SafetensorsHeader, build_header, check_finite, read_header

CONVERTERS: dict[str, type[ConvertibleKind]] = {
    "ADALORA": AdaLora,
    "BOFT": Boft,
    "C3A": C3a,
    "DELORA": DeLora,
    "GRALORA": GraLora,
    "HRA": Hra,
    "LOHA": LoHa,
    "LOKR": LoKr,
    "MISS": Miss,
    "OFT": Oft,
    "PVERA": Pvera,
    "RANDLORA": RandLora,
    "VBLORA": VbLora,
    "VERA": Vera,
}
INITIALISED: dict[str, type[ConvertibleKind]] = {"OLORA": Olora, "PISSA": Pissa}
"""LoRAs whose first factors were taken from the base, by their initialisation."""

_EVERYWHERE = frozenset(
    ("auto_mapping", "bias", "inference_mode", "peft_type", "peft_version", "revision", "task_type")
)

MAX_SHARED_BYTES = 64 << 20
MAX_TENSOR_BYTES = 32 << 20
"""Largest tensor that belongs to a single linear."""
MAX_WORK = 1.5e12
"""Maximum number of float64 multiplications of a conversion, which take some minutes of one core."""

ReadWeight = Callable[[str], torch.Tensor | None]
"""Function that returns a linear's weight as the base's checkpoint has it; None if the checkpoint has another name for
it."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a conversion."""

    peft_type: str
    """The original kind, by PEFT's name of the kind or of its initialisation."""
    max_rank: int
    """The largest rank of the resulting LoRA."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """One adapted linear of the base."""

    module: str
    shape: LinearShape
    factors: Factors

    @property
    def rank(self) -> int:
        """Rank of the written pair: at most the smaller side of the linear."""
        return min(self.factors.rank, self.shape.in_features, self.shape.out_features)

    def key(self, tensor: str) -> str:
        """A tensor's name in the file."""
        return f"{PREFIX}{self.module}.{tensor}"

    def copies(self, header: SafetensorsHeader) -> dict[str, str]:
        """Map the name of each copy of a shared tensor that the file holds for this linear to the original's name."""
        named = {self.key(copy): original for copy, original in self.factors.copies.items()}
        return {copy: original for copy, original in named.items() if copy in header.tensors}


@dataclass(frozen=True, slots=True)
class PlainLora:
    """The pairs of a LoRA that is to be written, in the order of the base's modules."""

    linears: Mapping[str, tuple[int, LinearShape]]
    """Rank and shape by the module's name."""
    base_model_name_or_path: str | None

    @property
    def max_rank(self) -> int:
        """The largest rank of any pair."""
        return max(rank for rank, _ in self.linears.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices in float32."""
        return sum(
            rank * (shape.in_features + shape.out_features) * ITEM_BYTES["F32"] for rank, shape in self.linears.values()
        )

    def config(self) -> dict[str, Any]:
        """Return adapter_config.json. Every module's alpha is its rank, because the scale is in the matrices."""
        common, pattern = compress_pattern({module: rank for module, (rank, _) in self.linears.items()})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": "none",
            "inference_mode": True,
            "r": common,
            "lora_alpha": common,
            "target_modules": list(self.linears),
            "rank_pattern": pattern,
            "alpha_pattern": pattern,
        }

    def header(self) -> bytes:
        """Return the first bytes of the weights file."""
        tensors: dict[str, tuple[str, Shape]] = {}
        for module, (rank, shape) in self.linears.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = "F32", (rank, shape.in_features)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = "F32", (shape.out_features, rank)
        return build_header(tensors)


def convert_adapter(
    folder: Path, into: Path, base: BaseDescription, limits: PlanLimits, read_weight: ReadWeight = lambda _: None
) -> Conversion | None:
    """Write to `into` a LoRA that is equivalent to the adapter in `folder`; return None if no conversion is needed.

    None means that the adapter is already a LoRA, or that its kind is not converted; validation then serves or refuses
    it. The written LoRA is float32 and must still be validated. Raises AdapterRejected: as parse_adapter_config,
    read_header, check_finite and plan_adapter do, and `rank_too_large` if the exact LoRA is too large for `limits`.
    """
    document = parse_document(read_config_file(folder))
    if (peft_type := converted_kind(document)) is None:
        return None
    config = _read(document, peft_type)
    matches = match_targets(config, base, config.rank_keys, config.alpha_keys)
    check_linears(matches, base)
    shapes = [base.modules[match.module] for match in matches]
    pairs = zip(matches, shapes, strict=True)
    linears = [_Linear(match.module, shape, config.factors(match, shape)) for match, shape in pairs]
    header = read_header(folder / WEIGHTS_NAME)
    shared = config.shared(shapes)
    _check_file(shared, linears, header, limits, describe_context(base, config.base_model_name_or_path))
    _check_ranks(linears, config, peft_type, limits)
    _check_work(linears, config, peft_type)
    check_finite(folder / WEIGHTS_NAME, header)
    kept = [linear for linear in linears if linear.rank]
    plain = PlainLora({linear.module: (linear.rank, linear.shape) for linear in kept}, config.base_model_name_or_path)
    check_size(plain.num_bytes, limits)
    write_lora(
        into, plain, _pairs(folder / WEIGHTS_NAME, header, shared, kept, _base_weights(config, peft_type, read_weight))
    )
    return Conversion(peft_type, plain.max_rank)


def known_fields(form: type[ConvertibleKind]) -> frozenset[str]:
    """Return the fields that may be on in the kind's adapter_config.json."""
    return frozenset(form.__struct_fields__) | form.HARMLESS | _EVERYWHERE


def _read(document: Mapping[str, Any], peft_type: str) -> ConvertibleKind:
    form = (CONVERTERS | INITIALISED)[peft_type]
    check_task_type(document.get("task_type"), is_lora=False)
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


def _check_file(
    shared: Mapping[str, Shape], linears: list[_Linear], header: SafetensorsHeader, limits: PlanLimits, where: str
) -> None:
    check_size(header.file_bytes, limits)
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


def _check_ranks(linears: list[_Linear], config: ConvertibleKind, peft_type: str, limits: PlanLimits) -> None:
    worst = max(linears, key=lambda linear: linear.rank)
    if worst.rank == 0:
        raise ConfigRejected("rank_pattern_empty", "rank_pattern", "rank_pattern leaves no rank to any module.")
    if worst.rank > limits.max_rank:
        raise ConfigRejected(
            "rank_too_large",
            "peft_type",
            f"A {peft_type} is served as the LoRA that computes exactly the same; here that has rank {worst.rank} at "
            f"{worst.module}, and this server takes up to {limits.max_rank}. "
            + config.TOO_LARGE.format(max_rank=limits.max_rank),
        )


def _check_work(linears: list[_Linear], config: ConvertibleKind, peft_type: str) -> None:
    if sum(linear.factors.work for linear in linears) > MAX_WORK:
        raise ConfigRejected(
            "base_too_large",
            config.BASE_FIELD,
            f"The LoRA that computes the same as this {peft_type} is made from {len(linears)} of the base's weights, "
            f"which takes too long on this server. {config.WAY_OUT}",
        )


def _base_weights(
    config: ConvertibleKind, peft_type: str, read_weight: ReadWeight
) -> Callable[[_Linear], torch.Tensor]:
    """Return the reader of a linear's own weight `[out_features, in_features]`, in float64."""

    def read(linear: _Linear) -> torch.Tensor:
        weight = read_weight(linear.module)
        if weight is not None and linear.shape.transposed:
            weight = weight.T
        if weight is None or weight.shape != (linear.shape.out_features, linear.shape.in_features):
            raise ConfigRejected(
                "field_unsupported",
                config.BASE_FIELD,
                f"The LoRA that computes the same as this {peft_type} is made from the base's weight of "
                f"{linear.module}, which this server's checkpoint has under another name or in another shape. "
                f"{config.WAY_OUT}",
            )
        return weight.double()

    return read


def _pairs(
    path: Path,
    header: SafetensorsHeader,
    shared: Mapping[str, Shape],
    linears: list[_Linear],
    base_weight: Callable[[_Linear], torch.Tensor],
) -> Iterator[tuple[str, Pair]]:
    """Yield every module with its pair, one at a time."""
    with path.open("rb") as file:

        def read(name: str) -> torch.Tensor:
            return read_tensor(file, header.tensors[name]).double()

        common = {name: read(name) for name in shared}
        for linear in linears:
            for copy, original in linear.copies(header).items():
                _check_copy(copy, read(copy), original, common[original])
            own = {name: read(linear.key(name)) for name in linear.factors.shapes}
            if linear.factors.work:
                own[BASE_WEIGHT] = base_weight(linear)
            yield linear.module, _pair(linear, common | own)


def _check_copy(copy: str, tensor: torch.Tensor, original: str, shared: torch.Tensor) -> None:
    if not torch.equal(tensor, shared):
        raise WeightsFileRejected("copy_differs", copy, f"{copy} must equal {original}, which all modules share.")


def _pair(linear: _Linear, tensors: Tensors) -> Pair:
    pair = linear.factors.pair(tensors)
    return folded(pair) if linear.rank < linear.factors.rank else pair


def write_lora(into: Path, plain: PlainLora, pairs: Iterable[tuple[str, Pair]]) -> None:
    """Write both files; `pairs` come in the order of `plain`. Raises WeightsFileRejected (`weights_overflow`)."""
    (into / CONFIG_NAME).write_text(json.dumps(plain.config(), indent=2))
    with (into / WEIGHTS_NAME).open("wb") as file:
        file.write(plain.header())
        for (module, (rank, shape)), (name, (a, b)) in zip(plain.linears.items(), pairs, strict=True):
            assert module == name
            assert (a.shape, b.shape) == ((rank, shape.in_features), (shape.out_features, rank))
            for matrix in (a, b):
                file.write(_rounded(matrix, module).numpy().data)


def _rounded(matrix: torch.Tensor, module: str) -> torch.Tensor:
    rounded = matrix.float().contiguous()
    if not torch.isfinite(rounded).all():
        raise WeightsFileRejected(
            "weights_overflow", None, f"The matrices of {module} multiply to values beyond what float32 can express."
        )
    return rounded
