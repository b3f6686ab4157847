"""The minimum time of work on a GPU whose memory bandwidth and matrix rate were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grid import ModelShape

ELEMENT = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Ceilings:
    """Bandwidth and matrix rate of the card, measured in this run."""

    bytes_per_ms: float
    """A large copy, reads and writes counted, or a large read, whichever is faster."""
    flops_per_ms: float
    """A large bfloat16 matrix product."""


@dataclass(frozen=True)
class Work:
    """Minimum bytes and operations of a computation."""

    num_bytes: float
    flops: float = 0.0

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Minimum time of the work: the larger of the times to move the bytes and to compute the operations."""
        return max(self.num_bytes / ceilings.bytes_per_ms, self.flops / ceilings.flops_per_ms)


def lora_work(in_features: int, widths: tuple[int, ...], ranks_of_rows: list[int], distinct: Iterable[int]) -> Work:
    """Return the work of shrink and expand for one group: adapters and inputs are read once, outputs are read and
    written, plus the products.
    """
    rows, out, total = len(ranks_of_rows), sum(widths), sum(distinct)
    weights = total * (in_features * len(widths) + out)
    flops = 2 * sum(ranks_of_rows) * (in_features * len(widths) + out)
    return Work(ELEMENT * (weights + rows * (in_features + 2 * out)), flops)


def attention_work(model: ModelShape, spans: list[tuple[int, int]]) -> Work:
    """Return the work of one layer over (query rows, context) spans: the context's KV and the queries are read once,
    outputs are written.
    """
    rows = sum(count for count, _ in spans)
    kv = sum(context for _, context in spans) * 2 * model.num_key_value_heads * model.head_dim
    heads = model.num_attention_heads * model.head_dim
    pairs = sum(count * context - count * (count - 1) / 2 for count, context in spans)
    return Work(ELEMENT * (kv + 2 * rows * heads), 4 * pairs * heads)


@dataclass(frozen=True)
class StepBytes:
    """Return the bytes that a step reads at least once."""

    weights: int
    kv: int
    adapters: int

    @property
    def omega(self) -> float:
        """Return the overhead of adapters that cost only their bytes (docs/benchmarks.md)."""
        return self.adapters / (self.weights + self.kv)

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Decoding is bound by memory."""
        return (self.weights + self.kv + self.adapters) / ceilings.bytes_per_ms


def kv_bytes_per_token(model: ModelShape) -> int:
    """Keys and values of one token in all layers (kappa)."""
    return 2 * ELEMENT * model.num_hidden_layers * model.num_key_value_heads * model.head_dim


def adapter_bytes(model: ModelShape, rank: int) -> int:
    """A and B of every linear of every layer."""
    per_layer = sum(in_features * len(widths) + sum(widths) for in_features, widths in model.groups.values())
    return ELEMENT * rank * model.num_hidden_layers * per_layer
