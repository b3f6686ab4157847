"""VeRA, PVeRA, RandLoRA and VB-LoRA: small tensors per linear beside matrices that all linears share.

Sources: https://arxiv.org/abs/2310.11454, https://arxiv.org/abs/2502.00987, https://arxiv.org/abs/2405.15179, and their
layers in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import Alpha, Rank
from loramux_adapters.convert.kind import ConvertibleKind, Factors, Pair, Shape, Tensors
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match

_SAVE = "Save it again with save_projection=true: a file without them cannot be read alike on every machine."
_COUNT = Meta(ge=1, le=1 << 20)


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
    """`dW = diag(lambda_b) B diag(lambda_d) A`, where A and B are the top left of the shared ones."""

    HARMLESS: ClassVar[frozenset[str]] = _Projected.HARMLESS | {"vera_dropout", "d_initial"}

    @override
    def shared(self, linears: Sequence[LinearShape]) -> dict[str, Shape]:
        widest, tallest = max(one.in_features for one in linears), max(one.out_features for one in linears)
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
        widest, tallest = max(one.in_features for one in linears), max(one.out_features for one in linears)
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
        widest, tallest = max(one.in_features for one in linears), max(one.out_features for one in linears)
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
            # The scaled basis is [r, bases, short], the other [long, bases, r]: PEFT flattens both as they lie.
            a, b = small.flatten(0, 1), large.flatten(1) * (self.randlora_alpha / self.r)
            return (a, b) if wide else (b.T, a.T)

        shapes = {"randlora_lambda": (self.r, bases), "randlora_gamma": (bases, short)}
        # PEFT 0.21 saves the shared bases with every linear too.
        copies = {name: f"base_model.{name}" for name in ("randlora_A", "randlora_B")}
        return Factors(shapes, bases * self.r, pair, copies)

    def _bases(self, short: int) -> int:
        return -(-short // self.r)


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
        # In float32 as in PEFT: among equal logits the same ones must win.
        _, indices = logits.float().topk(self.topk, dim=-1)
        weights = logits.gather(-1, indices).softmax(-1)
        return torch.einsum("...k,...kv->...v", weights, bank[indices])
