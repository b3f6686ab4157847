"""Kinds whose LoRA follows from their own file: they do not need the base's weights.

- LoHa, LoKr, AdaLoRA and DeLoRA are products of small matrices that belong to one linear each. Sources: FedPara
  (https://arxiv.org/abs/2108.06098), KronA (https://arxiv.org/abs/2212.10650).
- VeRA, PVeRA, RandLoRA and VB-LoRA have small tensors for each linear, and matrices that all linears share. Sources:
  https://arxiv.org/abs/2310.11454, https://arxiv.org/abs/2502.00987, https://arxiv.org/abs/2405.15179.
- MiSS, C3A and GraLoRA change the weight in blocks. Sources: https://arxiv.org/abs/2409.15371,
  https://arxiv.org/abs/2407.19342, https://arxiv.org/abs/2505.20355.

The layers of these kinds in PEFT are sources too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import Alpha, Name, Rank
from loramux_adapters.convert.kind import (
    ConvertibleKind,
    Factors,
    Pair,
    Patterned,
    RankPatterned,
    Ranks,
    Shape,
    Tensors,
)
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match

_NORM_FLOOR = 1e-4
"""Minimum norm by which DeLoRA divides."""
_RANK_GUARD = 1e-5
"""AdaLoRA: a constant that PEFT adds to the rank before it divides by the rank."""

_SAVE = "Save it again with save_projection=true: a file without them cannot be read alike on every machine."
_COUNT = Meta(ge=1, le=1 << 20)

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")


class _Lycoris(Patterned, frozen=True, kw_only=True):
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d")  # there are no convolutions here
    )

    r: Rank
    alpha: Alpha

    def _rank(self, match: Match) -> int:
        return self.rank_pattern.get(match.rank_key, self.r)

    def _scale(self, match: Match) -> float:
        return self.alpha_pattern.get(match.alpha_key, self.alpha) / self._rank(match)


class LoHa(_Lycoris, frozen=True, kw_only=True):
    """`dW = scale * (W1a W1b) o (W2a W2b)`, whose columns are those of the row-wise Khatri-Rao product: rank r^2."""

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        r, scale = self._rank(match), self._scale(match)
        shapes = {
            "hada_w1_a": (linear.out_features, r),
            "hada_w1_b": (r, linear.in_features),
            "hada_w2_a": (linear.out_features, r),
            "hada_w2_b": (r, linear.in_features),
        }

        def pair(tensors: Tensors) -> Pair:
            b = torch.einsum("oi,oj->oij", tensors["hada_w1_a"], tensors["hada_w2_a"]).flatten(1)
            a = torch.einsum("in,jn->ijn", tensors["hada_w1_b"], tensors["hada_w2_b"]).flatten(0, 1)
            return a, scale * b

        return Factors(shapes, r * r, pair)


class LoKr(_Lycoris, frozen=True, kw_only=True):
    """`dW = scale * W1 (x) W2`, and `(L1 R1) (x) (L2 R2) = (L1 (x) L2) (R1 (x) R2)`: the ranks multiply."""

    HARMLESS: ClassVar[frozenset[str]] = _Lycoris.HARMLESS | {"rank_dropout_scale"}

    decompose_both: bool = False
    decompose_factor: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        r, scale = self._rank(match), self._scale(match)
        outer_out, inner_out = factorization(linear.out_features, self.decompose_factor)
        outer_in, inner_in = factorization(linear.in_features, self.decompose_factor)
        split_outer = self.decompose_both and r < max(outer_out, outer_in) / 2
        split_inner = r < max(inner_out, inner_in) / 2
        shapes = _shapes("lokr_w1", outer_out, outer_in, r if split_outer else None)
        shapes |= _shapes("lokr_w2", inner_out, inner_in, r if split_inner else None)

        def pair(tensors: Tensors) -> Pair:
            left_1, right_1 = _split("lokr_w1", tensors)
            left_2, right_2 = _split("lokr_w2", tensors)
            return torch.kron(right_1, right_2), scale * torch.kron(left_1, left_2)

        return Factors(shapes, _rank("lokr_w1", shapes) * _rank("lokr_w2", shapes), pair)


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """Factor a dimension as PEFT does: `factor` itself if it divides, else the largest divisor up to it."""
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    limit = dimension if factor == -1 else factor
    small = next((m for m in range(min(limit, int(dimension**0.5)), 1, -1) if dimension % m == 0), 1)
    return small, dimension // small


def _shapes(name: str, out_features: int, in_features: int, rank: int | None) -> dict[str, Shape]:
    if rank is None:
        return {name: (out_features, in_features)}
    return {f"{name}_a": (out_features, rank), f"{name}_b": (rank, in_features)}


def _rank(name: str, shapes: Mapping[str, Shape]) -> int:
    return min(shapes[name]) if name in shapes else min(*shapes[f"{name}_a"], *shapes[f"{name}_b"])


def _split(name: str, tensors: Tensors) -> Pair:
    """Return left and right factors of one of the two matrices, as thin as possible."""
    if name in tensors:
        whole = tensors[name]
    else:
        left, right = tensors[f"{name}_a"], tensors[f"{name}_b"]
        if left.shape[1] <= min(left.shape[0], right.shape[1]):
            return left, right
        whole = left @ right
    eye = torch.eye(min(whole.shape), dtype=whole.dtype)
    return (whole, eye) if whole.shape[1] <= whole.shape[0] else (eye, whole)


class AdaLora(ConvertibleKind, frozen=True, kw_only=True):
    """`dW = scale * B diag(E) A`; rank_pattern selects the kept ranks, and the scale is that of all ranks."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        (
            "r",  # AdaLoRA reads init_r instead
            "target_r",
            "tinit",
            "tfinal",
            "deltaT",
            "beta1",
            "beta2",
            "orth_reg_weight",
            "total_step",
            "lora_dropout",
            "fan_in_fan_out",
            "init_lora_weights",
            "use_rslora",  # AdaLoRA has its own scale
            "megatron_core",
            "qalora_group_size",
            "ensure_weight_tying",
            "runtime_config",
        )
    )

    init_r: Rank
    lora_alpha: Alpha
    rank_pattern: Annotated[
        dict[Name, Annotated[tuple[bool, ...], Meta(min_length=1, max_length=65_536)]], Meta(max_length=10_000)
    ] = msgspec.field(default_factory=dict)

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        kept = self.rank_pattern.get(f"{match.module}.lora_E")
        rank = self.init_r if kept is None else sum(kept)
        scale = (self.lora_alpha if self.lora_alpha > 0 else rank) / (self.init_r + _RANK_GUARD)
        shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank), "lora_E": (rank, 1)}

        def pair(tensors: Tensors) -> Pair:
            return tensors["lora_A"] * tensors["lora_E"], scale * tensors["lora_B"]

        return Factors(shapes, rank, pair)


class DeLora(RankPatterned, frozen=True, kw_only=True):
    """`dW = B diag(lambda / (r |a_i| |b_i|)) A diag(w_norm)`; the file holds the base's w_norm."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("module_dropout", "init_weights", "delora_lambda", "lambda_pattern")  # trained, and then in the file
    )

    r: Rank

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        rank = self.rank_pattern.get(match.rank_key, self.r)
        shapes = {
            "delora_A": (rank, linear.in_features),
            "delora_B": (linear.out_features, rank),
            "delora_lambda": (1,),
            "delora_w_norm": (linear.in_features,),
        }

        def pair(tensors: Tensors) -> Pair:
            a, b = tensors["delora_A"], tensors["delora_B"]
            norms = a.norm(dim=1).clamp(min=_NORM_FLOOR) * b.norm(dim=0).clamp(min=_NORM_FLOOR)
            return a * tensors["delora_w_norm"], b * (tensors["delora_lambda"] / rank / norms)

        return Factors(shapes, rank, pair)


class _Projected(ConvertibleKind, frozen=True, kw_only=True):
    """A kind whose file holds random projections that every linear uses."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("projection_prng_key", "fan_in_fan_out", "init_weights"))

    r: Rank
    save_projection: bool = True

    def __post_init__(self) -> None:
        if not self.save_projection:
            raise ConfigRejected(
                "field_unsupported", "save_projection", f"The file lacks the random projections. {_SAVE}"
            )


class Vera(_Projected, frozen=True, kw_only=True):
    """`dW = diag(lambda_b) B diag(lambda_d) A`, where A and B are the top left parts of the shared matrices."""

    HARMLESS: ClassVar[frozenset[str]] = _Projected.HARMLESS | {"vera_dropout", "d_initial"}

    @override
    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:
        widest, tallest = _largest_sides(linears)
        return {"base_model.vera_A": (self.r, widest), "base_model.vera_B": (tallest, self.r)}

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        def pair(tensors: Tensors) -> Pair:
            a = tensors["base_model.vera_A"][:, : linear.in_features]
            b = tensors["base_model.vera_B"][: linear.out_features]
            return tensors["vera_lambda_d"][:, None] * a, tensors["vera_lambda_b"][:, None] * b

        return Factors({"vera_lambda_b": (linear.out_features,), "vera_lambda_d": (self.r,)}, self.r, pair)


class Pvera(_Projected, frozen=True, kw_only=True):
    """VeRA whose hidden values have a mean and a variance; without sampling, the mean is used."""

    HARMLESS: ClassVar[frozenset[str]] = _Projected.HARMLESS | {"pvera_dropout", "d_initial", "generator_seed"}
    REFUSED: ClassVar[Mapping[str, str]] = {
        "sample_at_inference": "Save it with sample_at_inference=false: the same prompt then has one answer."
    }

    @override
    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:
        widest, tallest = _largest_sides(linears)
        return {"base_model.pvera_A": (2 * self.r, widest), "base_model.pvera_B": (tallest, self.r)}

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        def pair(tensors: Tensors) -> Pair:
            a = tensors["base_model.pvera_A"][: self.r, : linear.in_features]
            b = tensors["base_model.pvera_B"][: linear.out_features]
            return tensors["pvera_lambda_d"][: self.r, None] * a, tensors["pvera_lambda_b"][:, None] * b

        return Factors({"pvera_lambda_b": (linear.out_features,), "pvera_lambda_d": (2 * self.r,)}, self.r, pair)


class RandLora(_Projected, frozen=True, kw_only=True):
    """`dW = scale * sum over n of B_n diag(lambda_n) A diag(gamma_n)`, or its transpose: n up to full rank."""

    HARMLESS: ClassVar[frozenset[str]] = _Projected.HARMLESS | {"randlora_dropout", "sparse", "very_sparse"}

    randlora_alpha: Alpha

    @override
    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:
        widest, tallest = _largest_sides(linears)
        short, long = sorted((widest, tallest))
        return {
            "base_model.randlora_A": (self.r, 1, short),
            "base_model.randlora_B": (long, self._bases(short), self.r),
        }

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        short, long = sorted((linear.in_features, linear.out_features))
        bases = self._bases(short)
        wide = short == linear.in_features

        def pair(tensors: Tensors) -> Pair:
            small = tensors["base_model.randlora_A"][:, :, :short]
            small = tensors["randlora_lambda"][:, :, None] * small * tensors["randlora_gamma"]
            large = tensors["base_model.randlora_B"][:long, :bases]
            # The scaled basis is [r, bases, short], the other basis [long, bases, r]: PEFT flattens both in their
            # memory order.
            a, b = small.flatten(0, 1), large.flatten(1) * (self.randlora_alpha / self.r)
            return (a, b) if wide else (b.T, a.T)

        shapes = {"randlora_lambda": (self.r, bases), "randlora_gamma": (bases, short)}
        # PEFT 0.21 saves the shared bases with every linear too.
        copies = {name: f"base_model.{name}" for name in ("randlora_A", "randlora_B")}
        return Factors(shapes, bases * self.r, pair, copies)

    def _bases(self, short: int) -> int:
        return -(-short // self.r)


def _largest_sides(linears: Sequence[LinearShape]) -> tuple[int, int]:
    """Return the largest number of inputs and the largest number of outputs of a linear."""
    return max(one.in_features for one in linears), max(one.out_features for one in linears)


class VbLora(ConvertibleKind, frozen=True, kw_only=True):
    """Rows of A and columns of B are chains of vectors: mixtures of the `topk` vectors of a bank that logits select."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("vblora_dropout", "fan_in_fan_out", "init_vector_bank_bound", "init_logits_std")
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        "save_only_topk_weights": "Save it again with save_only_topk_weights=false, which keeps the logits."
    }

    r: Rank
    num_vectors: Annotated[int, _COUNT]
    vector_length: Annotated[int, _COUNT]
    topk: Annotated[int, _COUNT]

    def __post_init__(self) -> None:
        if self.topk > self.num_vectors:
            raise ConfigRejected(
                "config_invalid", "topk", f"topk is {self.topk}, but there are only {self.num_vectors} vectors."
            )

    @override
    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:
        return {"base_model.vblora_vector_bank": (self.num_vectors, self.vector_length)}

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        for side in (linear.in_features, linear.out_features):
            if side % self.vector_length:
                raise ConfigRejected(
                    "config_invalid",
                    "vector_length",
                    f"vector_length {self.vector_length} does not divide {side}, a side of {match.module}.",
                )
        shapes = {
            "vblora_logits_A": (self.r, linear.in_features // self.vector_length, self.num_vectors),
            "vblora_logits_B": (linear.out_features // self.vector_length, self.r, self.num_vectors),
        }

        def pair(tensors: Tensors) -> Pair:
            bank = tensors["base_model.vblora_vector_bank"]
            a = self._mixed(tensors["vblora_logits_A"], bank).flatten(1)
            return a, self._mixed(tensors["vblora_logits_B"], bank).transpose(1, 2).flatten(0, 1)

        return Factors(shapes, self.r, pair)

    def _mixed(self, logits: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        """Map logits `[..., num_vectors]` to vectors `[..., vector_length]`."""
        # In float32 as in PEFT, because among equal logits the same entries must be chosen.
        _, indices = logits.float().topk(self.topk, dim=-1)
        weights = logits.gather(-1, indices).softmax(-1)
        return torch.einsum("...k,...kv->...v", weights, bank[indices])


class Miss(ConvertibleKind, frozen=True, kw_only=True):
    """`y += S(x) M`, S the sums of every r-th input: A selects the inputs, B is M transposed."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("miss_dropout",))

    r: Rank
    mini_r: Rank = 1
    init_weights: bool | str | None = True

    def __post_init__(self) -> None:
        if self.init_weights not in (True, False, None, "mini"):
            raise ConfigRejected(
                "field_unsupported",
                "init_weights",
                f"init_weights is {str(self.init_weights)[:40]!r}. MiSS in its 'bat' form multiplies the base's own "
                "weights, which no LoRA expresses without them. Train it with init_weights=true.",
            )

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        out_features, in_features = linear.out_features, linear.in_features
        width = self.mini_r if self.init_weights == "mini" else out_features
        if out_features % width or self.r > in_features:
            field = "mini_r" if out_features % width else "r"
            raise ConfigRejected("config_invalid", field, f"{field} does not fit {match.module}, {_sides(linear)}.")

        def pair(tensors: Tensors) -> Pair:
            block = tensors["miss_block"]
            chosen = torch.arange(in_features) % self.r
            a = torch.zeros(self.r, in_features, dtype=block.dtype)
            a[chosen, torch.arange(in_features)] = 1
            return a, block.repeat(1, out_features // width).T

        return Factors({"miss_block": (self.r, width)}, self.r, pair)


class C3a(ConvertibleKind, frozen=True, kw_only=True):
    """Blocks of circulant matrices, each given by one vector: full rank, so that the pair is the matrix itself."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("init_weights",))

    block_size: Rank
    block_size_pattern: Ranks = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.block_size_pattern:
            # C3A has its own rule for these keys; for plain names it equals the common one.
            if not _PLAIN.fullmatch(key):
                raise ConfigRejected(
                    "field_unsupported",
                    "block_size_pattern",
                    f"block_size_pattern has the key {key[:120]!r}; use names of modules, not expressions.",
                )

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.block_size_pattern)

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        size = self.block_size_pattern.get(match.rank_key, self.block_size)
        if linear.in_features % size or linear.out_features % size:
            raise ConfigRejected(
                "config_invalid", "block_size", f"block_size {size} does not divide {match.module}, {_sides(linear)}."
            )
        rows, columns = linear.out_features // size, linear.in_features // size

        def pair(tensors: Tensors) -> Pair:
            lanes = torch.arange(size)
            # Row j, column k of a block is element (k - j) mod n of its kernel.
            circulant = tensors["c3a_kernel"][:, :, (lanes[None, :] - lanes[:, None]) % size]
            delta = circulant.permute(0, 2, 1, 3).reshape(linear.out_features, linear.in_features)
            return torch.eye(linear.in_features, dtype=delta.dtype), delta / linear.in_features

        return Factors({"c3a_kernel": (rows, columns, size)}, linear.in_features, pair)


class GraLora(ConvertibleKind, frozen=True, kw_only=True):
    """A LoRA of rank r/k for each of the k x k blocks of the weight, and one of rank hybrid_r for the whole weight."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(("gralora_dropout", "fan_in_fan_out", "init_weights"))

    r: Rank
    alpha: Alpha
    gralora_k: Rank = 2
    hybrid_r: Annotated[int, Meta(ge=0, le=65_536)] = 0

    @override
    def factors(self, match: Match, linear: LinearShape) -> Factors:
        k, r = self.gralora_k, self.r
        if r % k or linear.in_features % k or linear.out_features % k:
            raise ConfigRejected(
                "config_invalid",
                "gralora_k",
                f"gralora_k {k} does not divide r {r} or {match.module}, {_sides(linear)}.",
            )
        scale = self.alpha / (r + self.hybrid_r)
        shapes: dict[str, tuple[int, ...]] = {
            "gralora_A": (k, linear.in_features // k, r),
            "gralora_B": (k, r, linear.out_features // k),
        }
        if self.hybrid_r:
            shapes["gralora_A_general.weight"] = (self.hybrid_r, linear.in_features)
            shapes["gralora_B_general.weight"] = (linear.out_features, self.hybrid_r)

        def pair(tensors: Tensors) -> Pair:
            a, b = _blocks(tensors["gralora_A"], tensors["gralora_B"])
            if self.hybrid_r:
                a = torch.cat((a, tensors["gralora_A_general.weight"]))
                b = torch.cat((b, tensors["gralora_B_general.weight"]), dim=1)
            return a, scale * b

        return Factors(shapes, k * r + self.hybrid_r, pair)


def _blocks(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """Join A `[k, in/k, r]` and B `[k, r, out/k]` to one pair of rank k * r: (input block, output block, s).

    Of input block n, ranks `[j * s, (j + 1) * s)` go to output block j, which takes them as its n-th s.
    """
    k, in_block, r = a.shape
    out_block, s = b.shape[2], r // k
    whole_a = torch.zeros(k, k, s, k, in_block, dtype=a.dtype)
    whole_b = torch.zeros(k, out_block, k, k, s, dtype=b.dtype)
    for n in range(k):
        whole_a[n, :, :, n] = a[n].view(in_block, k, s).permute(1, 2, 0)
        whole_b[n, :, :, n] = b[n].view(k, s, out_block).permute(2, 0, 1)
    return whole_a.view(k * r, k * in_block), whole_b.view(k * out_block, k * r)


def _sides(linear: LinearShape) -> str:
    return f"which has {linear.in_features} inputs and {linear.out_features} outputs"
