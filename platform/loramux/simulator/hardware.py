"""Devices and models as a few numbers, and the time of a step on them.

A step reads the weights, the KV of all contexts and the distinct adapters once, and computes two operations for each
weight and token. The time is the roofline, with the shares of the data sheet's figures that kernels reach in practice,
plus a fixed cost: an estimate. A device that was measured (`MeasuredSteps`) has the measured times of the measured
model instead. `docs/simulator.md` compares estimates with measured runs.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated

import msgspec
from msgspec import Meta

from loramux.engine.scheduling.policy import token_context

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cost of the server's own process. It does one thing at a time."""

    token_s: Seconds
    """Processor seconds of a streamed token."""
    request_s: Seconds
    """Processor seconds of a request."""
    latency_s: Seconds = 0.0
    """Seconds that an idle server adds to a request's first token."""


ESTIMATED_FRONT = Front(token_s=30e-6, request_s=3e-3)
"""Front of a device that was not measured, as `benchmarks/front.py` measured it on a fast core."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder's shape, in the names of transformers' configs."""

    num_hidden_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    vocab_size: Count
    head_dim: Count | None = None
    """Size of a head; None: hidden_size / num_attention_heads."""
    kv_lora_rank: Count | None = None
    """Elements of a token's compressed KV, next to those of `qk_rope_head_dim`; None: each head has keys and values."""
    qk_rope_head_dim: Count | None = None
    tie_word_embeddings: bool = False
    bytes_per_element: Count = 2
    bits_per_weight: Annotated[float, Meta(gt=0)] | None = None
    """Bits of a weight of a quantized layer's linears, with its scales; None: those of an element."""
    bytes_per_kv_element: Count | None = None
    """Bytes of a number of the KV cache: 1 in FP8 (its scales, 8 bytes for each page, layer and head, are not counted);
    None: those of an element."""
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    """Linears that adapters change."""
    max_model_len: Count = 8192
    num_ranks: Count = 1
    """Number of ranks; the model is one rank's share."""

    def share_of(self, size: int) -> Model:
        """Return the share of one of `size` ranks: a narrower model, as the engine makes it. Raises ValueError."""
        for field in ("num_attention_heads", "intermediate_size"):
            if (whole := getattr(self, field)) % size:
                raise ValueError(
                    f"the model's {field} of {whole} cannot be divided among {size} ranks; give a divisor of it"
                )
        if max(self.num_key_value_heads, size) % min(self.num_key_value_heads, size):
            raise ValueError(
                f"the model's {self.num_key_value_heads} key-value heads cannot be divided by {size} ranks"
            )
        return msgspec.structs.replace(
            self,
            num_attention_heads=self.num_attention_heads // size,
            num_key_value_heads=max(1, self.num_key_value_heads // size),
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            intermediate_size=self.intermediate_size // size,
            vocab_size=-(-self.vocab_size // size),
            num_ranks=size,
        )

    @property
    def num_reductions(self) -> int:
        """Number of sums over ranks in a step: one of the embedding, and two of each layer."""
        return 1 + 2 * self.num_hidden_layers if self.num_ranks > 1 else 0

    @property
    def sent_bytes_per_token(self) -> float:
        """Bytes that a rank sends in a step for each of its tokens."""
        pieces = 2 * (self.num_ranks - 1) / self.num_ranks
        return pieces * self.num_reductions * self.hidden_size * self.bytes_per_element

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Sizes (in, out) of a layer's linears."""
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        hidden, wide = self.hidden_size, self.intermediate_size
        query, key = head * self.num_attention_heads, head * self.num_key_value_heads
        return {
            "q": (hidden, query),
            "k": (hidden, key),
            "v": (hidden, key),
            "o": (query, hidden),
            "gate": (hidden, wide),
            "up": (hidden, wide),
            "down": (wide, hidden),
        }

    @property
    def num_active_weights(self) -> int:
        """Number of weights that every token goes through: the layers' and the output's."""
        return self._layers_weights + self.vocab_size * self.hidden_size

    @property
    def _layers_weights(self) -> int:
        return self.num_hidden_layers * sum(ins * outs for ins, outs in self.linears.values())

    @property
    def active_bytes(self) -> int:
        """Bytes of the weights that every token goes through; embedding and head are never quantized."""
        bits = self.bits_per_weight or 8 * self.bytes_per_element
        return round(self._layers_weights * bits / 8) + self.vocab_size * self.hidden_size * self.bytes_per_element

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in memory."""
        untied = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.active_bytes + untied * self.bytes_per_element

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of all layers for one token."""
        if self.kv_lora_rank is None:
            elements = 2 * self.linears["k"][1]
        else:
            elements = self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return (self.bytes_per_kv_element or self.bytes_per_element) * self.num_hidden_layers * elements

    @property
    def least_block_size(self) -> int:
        """Tokens of the smallest page that holds 16 rank rows of an adapter's widest side: the server's minimum."""
        widest = max(max(sides) for sides in self.linears.values())
        return -(-16 * widest * self.bytes_per_element // self.kv_bytes_per_token)

    @property
    def weights_per_rank(self) -> int:
        """Number of weights in one rank of an adapter, over all layers and targets."""
        linears = self.linears
        return self.num_hidden_layers * sum(sum(linears[target]) for target in self.lora_targets)

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of one adapter at its true rank."""
        return self.bytes_per_element * rank * self.weights_per_rank

    @property
    def attention_flops(self) -> int:
        """Operations for one query and one key, over all layers and heads: the product and the weighted sum."""
        return 4 * self.num_hidden_layers * self.linears["q"][1]

    @property
    def token_context(self) -> float:
        """Tokens of context whose attention costs a token of a CPU as much as its products, as in the engine."""
        context = token_context(self._layers_weights, self.attention_flops / 2)
        assert context is not None, "every layer reads the whole context"
        return context


Knots = Annotated[tuple[tuple[Count, Seconds], ...], Meta(min_length=1)]
"""Seconds by a count, in rising order; a line between two knots, and the last line continued."""


class MeasuredSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times of the steps of one model on one machine, from measured steps. The parts of a step are added."""

    model: Model
    token_s: Knots
    """Seconds of a step that computes n tokens of one prompt, by n, without the attention to them."""
    row_s: Knots
    """Seconds that a step takes longer if n sequences sample in it instead of one, by n."""
    context_s: Seconds
    """Seconds of one token of a context that is read."""
    pair_s: Seconds
    """Seconds of one query and one key."""
    adapters_s: Seconds
    """Seconds of a step with adapters, whatever their number."""
    adapter_s: Seconds
    """Seconds of one distinct adapter."""
    rank_s: Seconds
    """Seconds of one rank of a distinct adapter."""
    row_rank_s: Seconds
    """Seconds of one token and one rank of its adapter."""

    def scaled(self, factor: float) -> MeasuredSteps:
        """Return steps that take `factor` times as long."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "model"}
        scaled = {
            name: tuple((n, factor * s) for n, s in value) if isinstance(value, tuple) else factor * value
            for name, value in fields.items()
        }
        return msgspec.structs.replace(self, **scaled)

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        taken = between_knots(self.token_s, work.num_tokens) + between_knots(self.row_s, work.num_sampled)
        taken += self.context_s * work.context_tokens + self.pair_s * work.attention_pairs
        if work.num_adapters:
            ranks = work.adapter_bytes / self.model.adapter_bytes(1)
            taken += self.adapters_s + self.adapter_s * work.num_adapters + self.rank_s * ranks
            taken += self.row_rank_s * work.adapter_ranks
        return taken


def between_knots(knots: tuple[tuple[int, float], ...], count: int) -> float:
    """Return the seconds at `count`; at least the first knot's, and beyond the last on its line."""
    if count <= knots[0][0] or len(knots) == 1:
        return knots[0][1]
    after = min(bisect_right(knots, (count, float("inf"))), len(knots) - 1)
    (n0, s0), (n1, s1) = knots[after - 1], knots[after]
    return max(0.0, s0 + (s1 - s0) * (count - n0) / (n1 - n0))


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator. Bandwidths are in bytes per second, as in the data sheet."""

    memory_bytes: Positive
    memory_bandwidth: Positive
    flops: Positive
    """Dense bf16 operations per second."""
    link_bandwidth: Positive
    """Bytes per second from the host's memory."""
    disk_bandwidth: Positive = 2e9
    """Bytes per second into the host's memory."""
    memory_efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.8
    flops_efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.6
    step_overhead_s: Annotated[float, Meta(ge=0)] = 0.0008
    """Seconds for launches, sampling and planning of a step; measured: 0.8 to 2.2 ms without CUDA graphs."""
    load_overhead_s: Annotated[float, Meta(ge=0)] = 0.0003
    """Fixed seconds of one adapter's load, in addition to the time for its bytes."""
    load_latency_s: tuple[Seconds, Seconds] = (0.0, 0.0)
    """Minimum and maximum seconds that the storage adds to a load, uniformly distributed. Loads wait for the storage at
    the same time, so they end in any order, and several may end between two steps.
    """
    load_failures: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the loads that fail."""
    dollars_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Approximate on-demand price in US dollars; give your own."""
    peer_bandwidth: Positive = 25e9
    """Bytes per second that one rank sends to the others."""
    reduction_latency_s: Seconds = 0.00002
    """Fixed seconds of one sum over ranks, in addition to the time for its bytes."""
    is_shared_by_ranks: bool = False
    """True if all ranks are processes on this device and share its resources; else each rank has a separate device."""
    measured: MeasuredSteps | None = None
    """Measured times of steps; None: every step is estimated. Steps of another model than the measured one are
    estimated too."""
    front: Front | None = None
    """Measured cost of the server before this device; None: ESTIMATED_FRONT, which delays nothing."""

    def of_rank(self, size: int) -> Device:
        """Return the resources of one of `size` ranks, at the price of all."""
        if not self.is_shared_by_ranks:
            return msgspec.structs.replace(self, dollars_per_hour=self.dollars_per_hour * size)
        return msgspec.structs.replace(
            self,
            memory_bytes=self.memory_bytes / size,
            memory_bandwidth=self.memory_bandwidth / size,
            flops=self.flops / size,
            link_bandwidth=self.link_bandwidth / size,
        )

    def slowed(self, factor: float) -> Device:
        """Return a device that takes `factor` times as long for a step."""
        return msgspec.structs.replace(
            self,
            memory_bandwidth=self.memory_bandwidth / factor,
            flops=self.flops / factor,
            step_overhead_s=self.step_overhead_s * factor,
            measured=self.measured and self.measured.scaled(factor),
        )

    def measured_steps_of(self, model: Model) -> MeasuredSteps | None:
        """Return the measured times of `model`'s steps; None if other steps were measured, or none."""
        found = self.measured
        is_same = found and msgspec.structs.replace(found.model, max_model_len=model.max_model_len) == model
        return found if is_same else None


DEVICES = {
    "h200": Device(
        memory_bytes=141e9,
        memory_bandwidth=4.8e12,
        flops=989e12,
        link_bandwidth=50e9,
        dollars_per_hour=4.0,
        peer_bandwidth=450e9,
    ),
    "h100": Device(
        memory_bytes=80e9,
        memory_bandwidth=3.35e12,
        flops=989e12,
        link_bandwidth=50e9,
        dollars_per_hour=3.0,
        peer_bandwidth=450e9,
    ),
    "a100-80": Device(
        memory_bytes=80e9,
        memory_bandwidth=2.0e12,
        flops=312e12,
        link_bandwidth=25e9,
        dollars_per_hour=1.8,
        peer_bandwidth=300e9,
    ),
    "a10g": Device(memory_bytes=24e9, memory_bandwidth=600e9, flops=70e12, link_bandwidth=12e9, dollars_per_hour=1.0),
    # Two cores of an AMD EPYC, from measured steps of the 0.5b model in bf16 (decision 0002): 41 ms for 16 decoding
    # rows, 63 ms with 16 adapters of 0.58 of the base's bytes, 1.3 s for 1,024 tokens of prefill.
    "cpu": Device(
        memory_bytes=3e9,
        memory_bandwidth=26e9,
        flops=0.8e12,
        link_bandwidth=5e9,
        memory_efficiency=1.0,
        flops_efficiency=1.0,
        step_overhead_s=0.003,
        load_overhead_s=0.02,
        dollars_per_hour=0.08,
        is_shared_by_ranks=True,
    ),
}
"""Devices by name."""


def _llama(layers: int, hidden: int, wide: int, heads: int, kv_heads: int, vocab: int, **rest: int | bool) -> Model:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    return msgspec.convert(shape | rest, Model)


WEIGHT_BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.5, "nf4": 4.5}
"""Bits of a weight with its share of the scales: int4 in groups of 128 with zero points, nf4 in blocks of 64."""

MODELS = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, 128256),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000),
    "qwen2.5-0.5b": _llama(24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
}
"""Models by name."""


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """The work of one step."""

    num_tokens: int
    context_tokens: int
    """Number of keys and values read, over all sequences."""
    attention_pairs: int
    """Number of query-key pairs computed."""
    adapter_bytes: int
    """Bytes of the distinct adapters."""
    adapter_ranks: int
    """Sum over tokens of their adapter's rank."""
    num_sampled: int = 1
    """Number of sequences that get a token."""
    num_adapters: int = 0
    """Number of distinct adapters."""


class StepTime:
    """The time of a step as a function of its work."""

    def __init__(self, device: Device, model: Model) -> None:
        self._measured = device.measured_steps_of(model)
        self._bytes_per_second = device.memory_bandwidth * device.memory_efficiency
        self._flops = device.flops * device.flops_efficiency
        self._overhead = device.step_overhead_s
        self._active_bytes = model.active_bytes
        self._kv_bytes = model.kv_bytes_per_token
        self._token_flops = 2 * model.num_active_weights
        self._rank_flops = 2 * model.weights_per_rank
        self._pair_flops = model.attention_flops
        self._sent_bytes = model.sent_bytes_per_token
        self._peer_bandwidth = device.peer_bandwidth
        self._reductions_s = model.num_reductions * device.reduction_latency_s

    def seconds(self, work: StepWork, link_bandwidth: float = 0.0) -> float:
        """Return the seconds that `work` takes while adapters arrive at `link_bandwidth`, which the memory must write
        too."""
        if self._measured is not None:
            left = self._bytes_per_second / (self._bytes_per_second - link_bandwidth)
            return self._measured.seconds(work) * left
        computing = max(self.read_seconds(work, link_bandwidth), self.compute_seconds(work))
        return (
            self._overhead + computing + self._reductions_s + self._sent_bytes * work.num_tokens / self._peer_bandwidth
        )

    def read_seconds(self, work: StepWork, link_bandwidth: float = 0.0) -> float:
        """Return the seconds in which the memory reads the bytes of `work`."""
        read = self._active_bytes + self._kv_bytes * work.context_tokens + work.adapter_bytes
        return read / (self._bytes_per_second - link_bandwidth)

    def compute_seconds(self, work: StepWork) -> float:
        """Return the seconds in which the operations of `work` are computed."""
        flops = (
            self._token_flops * work.num_tokens
            + self._pair_flops * work.attention_pairs
            + self._rank_flops * work.adapter_ranks
        )
        return flops / self._flops
