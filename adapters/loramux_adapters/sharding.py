"""Tensor parallelism: the share of every weight that each rank holds, by family.

A rank runs transformers' own model of a *narrower config*: fewer heads, smaller feed-forward networks, a share of the
vocabulary. So its modules already have the right shapes, and the table below only describes how a checkpoint's tensors
are cut for it (Shoeybi et al., Megatron-LM, 2019):

    column-parallel   q, k, v, gate, up        rows of W; each rank has its own outputs, and needs no others
    row-parallel      o, down                  columns of W; the ranks' results are parts of a sum, which is reduced
    vocabulary        embedding, head          rows; looked-up rows are summed, logits are gathered on rank 0 whole
    norms, routers, latents  on every rank

A dimension is cut between *units* that belong together, such as the outputs of one head. Key-value heads are repeated
if there are fewer heads than ranks. transformers' own `tp_plan` names the same linears for the families that it covers;
a test compares both, and compares every family's tokens with those of one rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loramux_adapters.base import BaseDescription, LinearShape, ParameterShape, parameter_of
from loramux_adapters.errors import BaseUnusable
from loramux_adapters.families import Cut, family_of, reads_other_inputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Number of a decoder layer in the name of a module or tensor."""

NARROWED = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "prefix_dense_intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Fields of a config with the size of a dimension that is cut."""


class CannotShard(BaseUnusable):
    """The base cannot be divided among so many ranks; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """`units` blocks of `width` neighbouring indices of a dimension; a block is never divided."""

    units: int
    width: int = 1
    repeats: bool = False
    """True if ranks share a unit when there are fewer units than ranks: key-value heads."""
    pads: bool = False
    """True if the last rank's share may be shorter and is filled up with zeros: the vocabulary."""

    def share(self, rank: int, size: int, name: str) -> range:
        """Return the indices that `rank` of `size` holds. Raises CannotShard."""
        if self.pads:
            each = -(-self.units // size)
            return range(min(rank * each, self.units), min((rank + 1) * each, self.units))
        if self.units % size == 0:
            each = self.units // size
            return range(rank * each * self.width, (rank + 1) * each * self.width)
        if self.repeats and size % self.units == 0:
            unit = rank * self.units // size
            return range(unit * self.width, (unit + 1) * self.width)
        raise CannotShard(
            f"{name} has {self.units} parts, which {size} ranks cannot divide evenly; set "
            f"engine.tensor_parallel_size to a divisor of {self.units}."
        )

    def share_length(self, size: int, name: str) -> int:
        """Return the length of every rank's share."""
        return -(-self.units // size) if self.pads else len(self.share(0, size, name))


Shares = tuple[range, ...]
"""A rank's indices of a dimension, in order."""
Parts = tuple[ShardPart, ...]
Dimension = Callable[[int], Parts]
"""Function that divides a dimension's length into parts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule by which one kind of linear is cut: along outputs, inputs or neither."""

    outputs: Dimension | None = None
    """Cut of the outputs: column-parallel."""
    inputs: Dimension | None = None
    """Cut of the inputs: row-parallel, the results of the ranks are added up."""


WHOLE = Rule()


class Sharding:
    """Division of the base of `config` among `size` ranks."""

    def __init__(self, config: PretrainedConfig, size: int) -> None:
        """`config` is the whole model's."""
        self.size = size
        self.config = config
        self.family = family_of(config)
        self._rules = rules_of(config.get_text_config())

    def narrowed_config(self) -> PretrainedConfig:
        """Return the config of a rank's model."""
        narrowed = copy.deepcopy(self.config)
        text = narrowed.get_text_config()
        layers = layer_configs(text)
        if varies := len(layers) > 1:
            text.per_layer_config = None
        if not varies and getattr(text, "head_dim", None) is None:
            text.head_dim = text.hidden_size // text.num_attention_heads
        for config in (text, *layers) if varies else (text,):
            for field in NARROWED:
                value = getattr(config, field, None)
                if isinstance(value, int):
                    part = ShardPart(value, repeats=field == "num_key_value_heads")
                    setattr(config, field, part.share_length(self.size, f"config.json's {field}"))
        if varies:
            fields = ("head_dim", "num_key_value_heads")
            text.per_layer_config = {i: {f: getattr(one, f) for f in fields} for i, one in enumerate(layers)}
        text.vocab_size = ShardPart(text.vocab_size, pads=True).share_length(self.size, "vocab_size")
        for whole in (
            narrowed,
            text,
        ):  # an embedding refuses a padding token beyond its rows; the padding token matters only in training
            whole.pad_token_id = None
        return narrowed

    def outputs(self, name: str, rank: int, length: int) -> Shares | None:
        """Return the share of `rank` in the `length` outputs of the linear (or expert) of this name; None: all."""
        return _shares(self._rule(parameter_of(name)).outputs, length, rank, self.size, name)

    def inputs(self, name: str, rank: int, length: int) -> Shares | None:
        """Return the share of `rank` in the inputs of the linear (or expert) of this name; None: all inputs."""
        return _shares(self._rule(parameter_of(name)).inputs, length, rank, self.size, name)

    def is_row_parallel(self, name: str) -> bool:
        """Are the ranks' results of this linear parts of a sum?"""
        return self._rule(parameter_of(name)).inputs is not None

    def width(self, name: str, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the dimensions `(out_features, in_features)` of every rank's share."""
        rule = self._rule(parameter_of(name))
        return (
            _share_length(rule.outputs, out_features, self.size, name),
            _share_length(rule.inputs, in_features, self.size, name),
        )

    def check(self, base: BaseDescription) -> None:
        """Raise CannotShard if a linear of `base`, or its head, cannot be divided."""
        if base.vocabulary is None:
            raise CannotShard(
                "its output head is not one linear over the embedding's tokens, so that the vocabulary cannot be "
                "divided: engine.tensor_parallel_size must be 1."
            )
        if self.family.cut == "none":
            raise CannotShard(
                f"layers of {self.family.model_type} read all outputs of a linear at once, which ranks do not have: "
                "engine.tensor_parallel_size must be 1."
            )
        if "Conv1d" in base.others.values() and self.family.cut != "key heads":
            raise CannotShard(
                "its layers keep states whose division among ranks no test compares with the whole: "
                "engine.tensor_parallel_size must be 1."
            )
        linears: dict[str, LinearShape | ParameterShape] = {**base.modules, **base.parameters}
        for name, shape in linears.items():
            self.width(name, shape.out_features, shape.in_features)

    def tensor_cuts(self, key: str, shape: list[int], rank: int) -> list[Shares | None] | None:
        """Return the indices that `rank` reads of each dimension of a checkpoint's tensor (None: all). Return None for
        a tensor that is zero on this rank: the bias of a sum."""
        rule = self._rule(key)
        cuts: list[Shares | None] = [None] * len(shape)
        if rule is WHOLE:
            return cuts
        if rule.inputs is not None and (key.endswith("bias") or len(shape) == 1):
            return cuts if rank == 0 else None
        is_vector = len(shape) == 1 or key.endswith("bias")
        is_expert = len(shape) == (2 if is_vector else 3) and not key.endswith("conv1d.weight")
        first = 1 if is_expert else 0
        places = [first, first + 1]
        if is_expert and self.family.experts is not None and self.family.experts.is_transposed:
            places.reverse()
        for place, dimension in zip(places, (rule.outputs, rule.inputs), strict=True):
            if dimension is not None:
                at = len(shape) - 1 if is_vector else place
                cuts[at] = _shares(dimension, shape[at], rank, self.size, key)
        return cuts

    def length_of(self, key: str, length: int) -> int:
        """Return the number of rows of a rank's share of a vocabulary of `length` rows."""
        return ShardPart(length, pads=True).share_length(self.size, key)

    def is_vocabulary(self, key: str) -> bool:
        """Is this the embedding's or the head's weight?"""
        return self._rule(key).outputs is VOCABULARY

    def _rule(self, name: str) -> Rule:
        if reads_other_inputs(name):
            return WHOLE
        attribute = _attribute(name)
        if (layer := LAYER.search(name)) is not None and (rule := self._rules.get(f"{layer[1]}.{attribute}")):
            return rule
        return self._rules.get(attribute, WHOLE)


def is_held_by(rank: int, name: str) -> bool:
    """Return whether `rank` has the module or the tensor `name`. Rank 0 alone has those that read images or sound."""
    return rank == 0 or not reads_other_inputs(name)


def _attribute(name: str) -> str:
    """Return the last part of the name of a module or tensor, with `experts.` before that of stacked experts."""
    name = re.sub(r"(\.weight|\.bias|(?<=proj)_bias)$", "", name)
    parent, _, attribute = name.rpartition(".")
    return f"experts.{attribute}" if parent.endswith(".experts") else attribute


def _shares(dimension: Dimension | None, length: int, rank: int, size: int, name: str) -> Shares | None:
    if dimension is None or size == 1:
        return None
    shares, start = [], 0
    for part in dimension(length):
        share = part.share(rank, size, name)
        shares.append(range(start + share.start, start + share.stop))
        start += part.units * part.width
    if start != length:
        raise CannotShard(
            f"{name} has a dimension of {length}, which is not made of whole parts (heads, experts' halves) of the "
            "sizes that config.json says: they do not fit each other. Correct config.json, or give another base."
        )
    return tuple(shares)


def _share_length(dimension: Dimension | None, length: int, size: int, name: str) -> int:
    if dimension is None or size == 1:
        return length
    return sum(part.share_length(size, name) for part in dimension(length))


# The table.


def _plain(length: int) -> Parts:
    return (ShardPart(length),)


def _halves(length: int) -> Parts:
    """Parts of a linear with the gate's outputs first and then up's."""
    return (ShardPart(length // 2), ShardPart(length // 2))


def _pairs(length: int) -> Parts:
    """Parts of a linear whose outputs belong to gate and up alternately."""
    return (ShardPart(length // 2, 2),)


def VOCABULARY(length: int) -> Parts:  # noqa: N802 - a constant of the table
    """Parts of the vocabulary: one row per token."""
    return (ShardPart(length, pads=True),)


def _units(width: int, *, repeats: bool = False) -> Dimension:
    return lambda length: (ShardPart(length // width, width, repeats=repeats),)


def _joined(*parts: ShardPart) -> Dimension:
    return lambda _length: parts


FEED_FORWARD = {
    "gate_proj": Rule(outputs=_plain),
    "up_proj": Rule(outputs=_plain),
    "down_proj": Rule(inputs=_plain),
    "gate_up_proj": Rule(outputs=_halves),
    "experts.gate_up_proj": Rule(outputs=_halves),
    "experts.down_proj": Rule(inputs=_plain),
    # names that only some families' checkpoints have
    "w1": Rule(outputs=_plain),
    "w3": Rule(outputs=_plain),
    "w2": Rule(inputs=_plain),
    "c_fc": Rule(outputs=_plain),
    "c_proj": Rule(inputs=_plain),
    "input_linear": Rule(outputs=_halves),
    "output_linear": Rule(inputs=_plain),
    "embed_tokens": Rule(outputs=VOCABULARY),
    "lm_head": Rule(outputs=VOCABULARY),
}


def rules_of(text: Any) -> dict[str, Rule]:
    """Return the rules of a family by the last part of a linear's name, with the layer's number before it if the rule
    differs by layer; linears without a rule are whole."""
    layers, family = layer_configs(text), family_of(text)
    rules = FEED_FORWARD | _heads(layers[0])
    if len(layers) > 1:
        rules |= {f"{i}.{name}": rule for i, one in enumerate(layers) for name, rule in _heads(one).items()}
    if family.experts is not None and family.experts.alternates_gate_and_up:
        rules["experts.gate_up_proj"] = Rule(outputs=_pairs)
    return rules | CUTS[family.cut](text)


def layer_configs(text: Any) -> list[Any]:
    """Return the text's config, or that of each layer if layers have different fields."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _heads(text: Any) -> dict[str, Rule]:
    """Queries, keys and values are cut by their heads."""
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv = _units(width, repeats=True)
    return {
        "q_proj": Rule(outputs=_units(width)),
        "k_proj": Rule(outputs=kv),
        "v_proj": Rule(outputs=kv),
        "o_proj": Rule(inputs=_units(width)),
        "sinks": Rule(outputs=_plain),
        "qkv_proj": Rule(outputs=_joined(ShardPart(heads, width), *[ShardPart(kv_heads, width, repeats=True)] * 2)),
    }


def _latent(text: Any) -> dict[str, Rule]:
    """Multi-head latent attention: the latents are whole, the tensors made of them are cut by heads."""
    query = text.qk_nope_head_dim + text.qk_rope_head_dim
    return {
        "q_proj": Rule(outputs=_units(query)),
        "q_b_proj": Rule(outputs=_units(query)),
        "kv_b_proj": Rule(outputs=_units(text.qk_nope_head_dim + text.v_head_dim)),
        "o_proj": Rule(inputs=_units(text.v_head_dim)),
    }


def _normed(text: Any) -> dict[str, Rule]:
    """Queries and keys are normalised over all heads together."""
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {"q_norm": Rule(outputs=_units(width)), "k_norm": Rule(outputs=_units(width, repeats=True))}


def _normed_by_head(_text: Any) -> dict[str, Rule]:
    """A norm's weight has a row for each head."""
    rows = Rule(outputs=_plain)
    return {"q_norm": rows, "k_norm": Rule(outputs=_units(1, repeats=True))}


def _hybrid(text: Any) -> dict[str, Rule]:
    """Queries come with a gate of the same width; linear attention is cut by its key heads."""
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    key_dim, value_dim, each = text.linear_key_head_dim, text.linear_value_head_dim, values // keys
    mixed = _joined(ShardPart(keys, key_dim), ShardPart(keys, key_dim), ShardPart(keys, each * value_dim))
    by_value = Rule(outputs=lambda length: (ShardPart(keys, length // keys),))
    return {
        "q_proj": Rule(outputs=_units(2 * text.head_dim)),
        "in_proj_qkvz": Rule(outputs=_units(2 * key_dim + 2 * each * value_dim)),
        "in_proj_ba": Rule(outputs=_units(2 * each)),
        "in_proj_qkv": Rule(outputs=mixed),
        "conv1d": Rule(outputs=mixed),
        **dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"), by_value),
        "out_proj": Rule(inputs=_units(each * value_dim)),
    }


CUTS: Mapping[Cut, Callable[[Any], dict[str, Rule]]] = {
    "heads": lambda _text: {},
    "none": lambda _text: {},
    "latent heads": _latent,
    "heads and norms over all heads": _normed,
    "heads and their norms": _normed_by_head,
    "key heads": _hybrid,
}
"""Rules that a cut adds to those of all families, from the text's config."""
