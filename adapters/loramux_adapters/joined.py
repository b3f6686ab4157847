"""Linears of a base that join several linears of other models, and the rows of the joined linear that each part has.

An adapter on `q_proj`, `k_proj` and `v_proj` changes blocks of rows of a base's `qkv_proj`. Sizes are shares of the
linear's outputs, so one entry is valid for feed-forward networks of any width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """The outputs of a joined linear: `units` blocks, each of which has a share of every part, in their order."""

    parts: tuple[str, ...]
    """Names of the linears before they were joined."""
    shares: tuple[int, ...]
    """Sizes of the parts, as multiples of a common size."""
    units: int = 1

    def rows(self, part: int, out_features: int) -> tuple[range, ...] | None:
        """Return the rows of one part, in its own order; None if `out_features` cannot be divided into these shares."""
        size, rest = divmod(out_features, self.units * sum(self.shares))
        if rest:
            return None
        before, own = size * sum(self.shares[:part]), size * self.shares[part]
        unit = size * sum(self.shares)
        return tuple(range(start + before, start + before + own) for start in range(0, out_features, unit))


HALVES = JoinedLinear(("gate_proj", "up_proj"), (1, 1))


def joined_linears(text: Any) -> dict[str, JoinedLinear]:
    """Return the joined linears that a text model of this config may have, by the last part of their names.

    Source: the `forward` of transformers' Phi3Attention, Phi3MLP, Qwen3_5GatedDeltaNet and Qwen3NextGatedDeltaNet.
    """
    if getattr(text, "is_heterogeneous", False):
        return {"gate_up_proj": HALVES}  # layers have different numbers of heads: no family joins them
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    joined = {
        "qkv_proj": JoinedLinear(("q_proj", "k_proj", "v_proj"), (heads, kv_heads, kv_heads)),
        "gate_up_proj": HALVES,
    }
    if (keys := getattr(text, "linear_num_key_heads", None)) is None:
        return joined
    key_dim, value_dim = text.linear_key_head_dim, text.linear_value_head_dim
    each = text.linear_num_value_heads // keys
    values = each * value_dim
    return joined | {
        "in_proj_qkv": JoinedLinear(("in_proj_q", "in_proj_k", "in_proj_v"), (key_dim, key_dim, values)),
        "in_proj_qkvz": JoinedLinear(
            ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"), (key_dim, key_dim, values, values), keys
        ),
        "in_proj_ba": JoinedLinear(("in_proj_b", "in_proj_a"), (1, 1), keys),
    }
