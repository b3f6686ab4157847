"""Kinds whose LoRA is made from the base's weights: rotations, and LoRAs that were initialised from the base.

OFT, BOFT and HRA rotate the inputs of a linear before the base's own weight multiplies them. A rotated input `x R` is
the same as the weight `W R^T`: the weight gains `W (R^T - I)`.

- OFT (https://arxiv.org/abs/2306.07280) and BOFT (https://arxiv.org/abs/2311.06243): R is a diagonal of orthogonal
  blocks, each given by a skew-symmetric Q. R - I has the rank of Q, so the change has the rank of the linear's smaller
  side. R is not orthogonal in OFT's default form, a Neumann series that ends after some terms: it is computed as PEFT
  does.
- HRA (https://arxiv.org/abs/2405.17484): a product of r reflections, so R - I has rank r.

PiSSA and OLoRA save trained factors, and PEFT subtracts the first factors B0 A0 from the base again when it loads them.
On an unchanged base the weight gains `scale * B A - B0 A0`: a pair of twice the rank. Both products are projections of
the weight W, which are unique, although their factors are not:

- PiSSA (https://arxiv.org/abs/2404.02948): `U U^T W`, U the left singular vectors of the r largest singular values.
- OLoRA (https://arxiv.org/abs/2406.01775): `scale * Q Q^T W`, Q an orthonormal basis of the first r columns of W.

U is computed from the eigenvectors of the smaller of `W W^T` and `W^T W`, in float64: cheaper than decomposing W.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import HARMLESS, OTHER_TOOLS, RESTORE, Alpha, Rank
from loramux_adapters.convert.kind import (
    BASE_WEIGHT,
    ConvertibleKind,
    Factors,
    Pair,
    Patterned,
    Tensors,
    pair_of_change,
)
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match

_RETRAIN = "Train a LoRA on the same data (peft.LoraConfig) and upload that."
_NEUMANN_FIXED = (0, 18)
"""The first PEFT that computes OFT's Neumann series as PEFT 0.21 does."""

_Count = Annotated[int, Meta(ge=0, le=65_536)]


class _Rotation(ConvertibleKind, frozen=True, kw_only=True):
    """A kind that rotates inputs by blocks: its change has the rank of the linear's smaller side."""

    TOO_LARGE: ClassVar[str] = (
        "It turns the inputs of each linear that it targets, so this rank is the smaller side of the linear, whatever "
        "the size of its blocks. Target linears with a side of at most {max_rank}, or train a LoRA on the same data "
        "(peft.LoraConfig) and upload that."
    )
    WAY_OUT: ClassVar[str] = _RETRAIN

    def _factors(self, linear: LinearShape, tensors: dict[str, tuple[int, ...]], block_size: int) -> Factors:
        def pair(own: Tensors) -> Pair:
            weight = own[BASE_WEIGHT]
            return pair_of_change(self._turned(weight, own, block_size) - weight)

        rank = min(linear.in_features, linear.out_features)
        return Factors(tensors, rank, pair, work=float(linear.in_features * linear.out_features * block_size))

    def _turned(self, weight: torch.Tensor, tensors: Tensors, block_size: int) -> torch.Tensor:
        """Return the base's weight `[out_features, in_features]` as the adapter changes it."""
        raise NotImplementedError


class Oft(_Rotation, frozen=True, kw_only=True):
    """`R = diag(R_1, ...)`, and `R_i = (I - Q_i) (I + Q_i)^-1` or its Neumann series."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("module_dropout", "fan_in_fan_out", "init_weights"))

    r: _Count = 0
    oft_block_size: _Count
    coft: bool = False
    eps: Annotated[float, Meta(ge=0, le=1e6)] = 6e-5
    block_share: bool = False
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: Annotated[int, Meta(ge=1, le=64)] = 5
    peft_version: Annotated[str, Meta(max_length=64)] | None = None

    def __post_init__(self) -> None:
        if (self.r == 0) == (self.oft_block_size == 0):
            raise ConfigRejected(
                "config_invalid",
                "oft_block_size",
                f"r is {self.r} and oft_block_size is {self.oft_block_size}; exactly one of them must be 0.",
            )
        if self.use_cayley_neumann and _version(self.peft_version) < _NEUMANN_FIXED:
            raise ConfigRejected(
                "field_unsupported",
                "use_cayley_neumann",
                "use_cayley_neumann is true and peft_version is not 0.18 or later: PEFT 0.18 changed what such weights "
                "compute, so PEFT itself does not compute what was trained any more. Train it again with a newer PEFT, "
                "or with use_cayley_neumann=false.",
            )

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        size = self._block_size(linear.in_features)
        stored = 1 if self.block_share else linear.in_features // size
        return self._factors(linear, {"oft_R.weight": (stored, size * (size - 1) // 2)}, size)

    def _block_size(self, in_features: int) -> int:
        """Return the size of the linear's blocks: PEFT takes the nearest divisor of the inputs."""
        if self.r == 0:
            return nearest_divisor(in_features, self.oft_block_size)
        return in_features // nearest_divisor(in_features, self.r)

    @override
    def _turned(self, weight: torch.Tensor, tensors: Tensors, block_size: int) -> torch.Tensor:
        skew = _skew(tensors["oft_R.weight"], block_size)
        if self.coft:
            limit = self.eps / len(skew) ** 0.5
            norms = torch.linalg.matrix_norm(skew, keepdim=True)
            skew = torch.where(norms <= limit, skew, limit * skew / norms)
        blocks = _neumann(skew, self.num_cayley_neumann_terms) if self.use_cayley_neumann else _cayley(skew)
        return _times_blocks(weight, blocks)


class Boft(_Rotation, frozen=True, kw_only=True):
    """OFT with `Q_i = (M_i - M_i^T) / 2`, and a factor for each output."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("boft_dropout", "fan_in_fan_out", "init_weights"))

    boft_block_size: _Count = 4
    boft_block_num: _Count = 0
    boft_n_butterfly_factor: Annotated[int, Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if (self.boft_block_size == 0) == (self.boft_block_num == 0):
            raise ConfigRejected(
                "config_invalid",
                "boft_block_size",
                f"boft_block_size is {self.boft_block_size} and boft_block_num is {self.boft_block_num}; exactly one "
                "of them must be 0.",
            )
        if self.boft_n_butterfly_factor > 1:
            raise ConfigRejected(
                "field_unsupported",
                "boft_n_butterfly_factor",
                f"boft_n_butterfly_factor is {self.boft_n_butterfly_factor}; PEFT itself takes 1 wherever its CUDA "
                "extension was not built. If the first dimension of the boft_R tensors is 1, that was so: set the "
                f"field to 1. Otherwise: {_RETRAIN}",
            )

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        blocks = self.boft_block_num or linear.in_features // self.boft_block_size
        size = self.boft_block_size or linear.in_features // self.boft_block_num
        if blocks * size != linear.in_features:
            field = "boft_block_num" if self.boft_block_num else "boft_block_size"
            raise ConfigRejected(
                "config_invalid",
                field,
                f"{field} {self.boft_block_num or self.boft_block_size} does not divide the {linear.in_features} "
                f"inputs of {match.module}.",
            )
        shapes = {"boft_R": (1, blocks, size, size), "boft_s": (linear.out_features, 1)}
        return self._factors(linear, shapes, size)

    @override
    def _turned(self, weight: torch.Tensor, tensors: Tensors, block_size: int) -> torch.Tensor:
        [blocks] = tensors["boft_R"]
        return tensors["boft_s"] * _times_blocks(weight, _cayley((blocks - blocks.transpose(1, 2)) / 2))


class Hra(ConvertibleKind, frozen=True, kw_only=True):
    """The weight is `W H_1 ... H_r` with `H_i = I - 2 u_i u_i^T`: each subtracts a matrix of rank 1."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("init_weights",))
    WAY_OUT: ClassVar[str] = _RETRAIN

    r: Rank
    apply_GS: bool = False  # noqa: N815 - PEFT's name

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        def pair(tensors: Tensors) -> Pair:
            vectors = tensors["hra_u"]
            # Gram-Schmidt makes the vectors orthogonal; the product then depends only on the space that they span.
            directions = torch.linalg.qr(vectors).Q.T if self.apply_GS else (vectors / vectors.norm(dim=0)).T
            return directions, _reflected(tensors[BASE_WEIGHT], directions)

        work = float(linear.in_features * linear.out_features * self.r)
        return Factors({"hra_u": (linear.in_features, self.r)}, self.r, pair, work=work)


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`, or the smaller of two, as PEFT adjusts OFT's
    sizes."""
    if wanted >= number:
        return number
    higher = next(one for one in range(wanted, number + 1) if number % one == 0)
    lower = next(one for one in range(wanted, 0, -1) if number % one == 0)
    return lower if wanted - lower <= higher - wanted else higher


def _version(written: str | None) -> tuple[int, int]:
    """Return major and minor of PEFT's version; (0, 0) if the file has none, because PEFT before 0.18 wrote none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", written or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _skew(upper: torch.Tensor, size: int) -> torch.Tensor:
    """Return the skew-symmetric matrices `[blocks, size, size]` whose entries above the diagonal are `upper`."""
    rows, columns = torch.triu_indices(size, size, 1)
    matrices = torch.zeros(len(upper), size, size, dtype=upper.dtype)
    matrices[:, rows, columns] = upper
    return matrices - matrices.transpose(1, 2)


def _cayley(skew: torch.Tensor) -> torch.Tensor:
    """Return `(I + Q)^-1 (I - Q)` for each Q, the Cayley transform; both factors commute."""
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return torch.linalg.solve(eye + skew, eye - skew)


def _neumann(skew: torch.Tensor, terms: int) -> torch.Tensor:
    """Return `I + 2 Q + 2 Q^2 + ... + Q^n`, the series as PEFT ends it.

    The last power is `terms - 1`, at least 3 if there is a square at all, and has the factor 1.
    """
    total = torch.eye(skew.shape[-1], dtype=skew.dtype).expand_as(skew)
    if terms == 1:
        return total
    total = total + 2 * skew
    if terms == 2:
        return total
    power = skew @ skew
    total = total + 2 * power
    for _ in range(3, terms - 1):
        power = power @ skew
        total = total + 2 * power
    return total + power @ skew


def _times_blocks(weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return `W diag(R_1, ...)^T`; a single block is repeated for all."""
    parts = weight.unflatten(1, (-1, blocks.shape[-1]))
    return torch.einsum("oni,nki->onk", parts, blocks.expand(parts.shape[1], -1, -1)).flatten(1)


def _reflected(weight: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return B `[out_features, r]` so that `W + B U = W H_1 ... H_r`, where row i of U `[r, in_features]` is u_i."""
    b = torch.empty(len(weight), len(directions), dtype=weight.dtype)
    images = weight @ directions.T
    overlaps = directions @ directions.T
    for i in range(len(directions)):
        b[:, i] = -2 * (images[:, i] + b[:, :i] @ overlaps[:i, i])
    return b


class _Initialised(Patterned, frozen=True, kw_only=True):
    """A LoRA whose first factors were taken from the base."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset((*HARMLESS, *OTHER_TOOLS, "init_lora_weights"))
    BASE_FIELD: ClassVar[str] = "init_lora_weights"
    WAY_OUT: ClassVar[str] = RESTORE

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        rank = self.rank_pattern.get(match.rank_key, self.r)
        alpha = self.alpha_pattern.get(match.alpha_key, self.lora_alpha)
        scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        if linear.transposed or rank > min(linear.in_features, linear.out_features) or scale == 0:
            raise ConfigRejected(
                "config_invalid",
                "r",
                f"PEFT cannot start rank {rank} and alpha {alpha} from the weight of {match.module}. {RESTORE}",
            )
        shapes = {"lora_A.weight": (rank, linear.in_features), "lora_B.weight": (linear.out_features, rank)}

        def pair(tensors: Tensors) -> Pair:
            first_a, first_b = self._first(tensors[BASE_WEIGHT], rank, scale)
            a = torch.cat((tensors["lora_A.weight"], first_a))
            return a, torch.cat((scale * tensors["lora_B.weight"], -first_b), dim=1)

        return Factors(shapes, 2 * rank, pair, work=self._work(linear, rank))

    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        """Return the factors of the product that PEFT subtracts from `weight` `[out_features, in_features]`."""
        raise NotImplementedError

    def _work(self, linear: LinearShape, rank: int) -> float:
        """Estimate the multiplications that `_first` takes."""
        raise NotImplementedError


class Pissa(_Initialised, frozen=True, kw_only=True):
    """PiSSA, which trains the principal part of the weight."""

    @override
    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        is_wide = weight.shape[0] <= weight.shape[1]
        gram = weight @ weight.T if is_wide else weight.T @ weight
        vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:]
        return (vectors.T @ weight, vectors) if is_wide else (vectors.T, weight @ vectors)

    @override
    def _work(self, linear: LinearShape, rank: int) -> float:
        small, large = sorted((linear.in_features, linear.out_features))
        return float(small**2 * large + 5 * small**3)


class Olora(_Initialised, frozen=True, kw_only=True):
    """OLoRA, which trains an orthonormal basis of the weight's columns."""

    @override
    def _first(self, weight: torch.Tensor, rank: int, scale: float) -> Pair:
        basis = torch.linalg.qr(weight[:, :rank]).Q
        return basis.T @ weight, scale * basis

    @override
    def _work(self, linear: LinearShape, rank: int) -> float:
        return float(linear.in_features * linear.out_features * rank)
