"""AdaLoRA and DeLoRA: a LoRA with something on the diagonal between A and B.

Sources: https://arxiv.org/abs/2303.10512, https://arxiv.org/abs/2503.18225, and their layers in PEFT.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from typing_extensions import override

from loramux_adapters.base import LinearShape
from loramux_adapters.config import Alpha, Name, Rank
from loramux_adapters.convert.form import Factors, Form, Pair, Ranks, Tensors
from loramux_adapters.matching import Match

_NORM_FLOOR = 1e-4
_RANK_GUARD = 1e-5
"""What PEFT adds to the rank that it divides by."""


class AdaLora(Form, frozen=True, kw_only=True):
    """`dW = scale * B diag(E) A`; rank_pattern says which ranks were kept, and the scale is that of all of them."""

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


class DeLora(Form, frozen=True, kw_only=True):
    """`dW = B diag(lambda / (r |a_i| |b_i|)) A diag(w_norm)`, w_norm being the base's, which the file holds."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        ("module_dropout", "init_weights", "delora_lambda", "lambda_pattern")  # trained, and then in the file
    )

    r: Rank
    rank_pattern: Ranks = msgspec.field(default_factory=dict)

    @property
    @override
    def rank_keys(self) -> tuple[str, ...]:
        return tuple(self.rank_pattern)

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
