"""Encoders: bases that read a whole text in both directions, give its vector or its classes, and generate nothing.

A step holds whole prompts, packed one after the other without padding, rows of one adapter contiguous as for every
base. transformers' own modules compute the hidden states on `[1, total_tokens]`; attention is one call for each prompt,
over the prompt's own rows. No KV is kept: a prompt begins and ends in one step, and holds one page for this time, so
that the pool bounds the prompts of a step.

A vector is pooled from the states as the request says, and then goes through the Dense modules of the checkpoint's
folder, if it has any. Classes come from one state of each text: it goes through the checkpoint's own module before the
head, if the family has one, and through the head of the request's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from loramux.common.sentence_files import BundleRejected, dense_modules
from loramux.common.settings.file import Settings
from loramux.engine.execution.assembly import allocate_pool, choose_format, sites_of, widest_tile
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import weights_digest
from loramux.engine.execution.memory_plan import TYPICAL_RANK, Card, MemoryPlan, StepMemory, fit_on_card, limits_on
from loramux.engine.execution.runner import (
    CompletedStep,
    Ints,
    PackedStep,
    PooledChunk,
    PooledVectors,
    StepGraphs,
    pack,
)
from loramux.engine.memory.image_rows import ImageRows
from loramux.engine.messages import ModelFacts, Pooling, StepLimits
from loramux.engine.scheduling.sequence import BASE_SLOT, Chunk, Step
from loramux_adapters.bank import AdapterBank
from loramux_adapters.base import MODEL_LOCK, BaseDescription, auto_class
from loramux_adapters.base_weights import BaseWeights
from loramux_adapters.families import Encoder
from loramux_adapters.modules import install
from loramux_kernels.device import to_device, to_host
from loramux_kernels.format_choice import FormatChoice
from loramux_kernels.packed_linear import Packing

IMPLEMENTATION = "loramux_both_ways"
TILES_PER_PAGE = 4
"""Rank tiles of the widest linear that a page holds."""
WINDOW_ROWS = 512
"""Rows of a prompt whose local attention is computed at once: then memory grows with the prompt, not its square."""
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


@dataclass(slots=True)
class EncoderStep:
    """The prompts of a step, which a forward passes to every layer's attention."""

    spans: list[tuple[int, int]]
    """First row and one past the last of each prompt."""
    layers: set[int] = field(default_factory=set)
    """Layers that have called attention."""


def attend_both_ways(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    encoder_step: EncoderStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of each prompt's rows over all rows of the prompt.

    query `[1, H, T, D]`, key `[1, Hkv, T, D]`, value `[1, Hkv, T, Dv]`, already rotated; returns `[1, T, H, Dv]`.
    `sliding_window` w: a row at p sees the rows at distances below w.
    """
    assert attention_mask is None, "no mask function is registered, so transformers passes none"
    encoder_step.layers.add(id(module))
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for start, stop in encoder_step.spans:
        window = stop - start if sliding_window is None else min(sliding_window, stop - start)
        height = stop - start if window == stop - start else WINDOW_ROWS
        for first in range(start, stop, height):
            last = min(first + height, stop)
            seen = slice(max(start, first - window + 1), min(stop, last + window - 1))
            mask = None
            if seen.start > start or seen.stop < stop or window < stop - start:
                rows = torch.arange(first, last, device=query.device)[:, None]
                mask = (rows - torch.arange(seen.start, seen.stop, device=query.device)).abs() < window
            states = functional.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            output[:, first:last] = states.transpose(1, 2)
    return output, None


AttentionInterface.register(IMPLEMENTATION, attend_both_ways)


class EncoderForward:
    """A model whose linears serve `bank`."""

    def __init__(self, model: PreTrainedModel, family: Encoder, bank: AdapterBank, *, has_head: bool) -> None:
        """`has_head`: the checkpoint has its own head."""
        self.bank = bank
        self._activation = ACTIVATIONS[family.activation]
        self._own_head = [model.get_submodule(name) for name in family.head] if has_head else None
        self._family = family
        self._config = model.config
        self._transform = _detach(model, family.transform)
        self._body: Any = model.get_submodule(family.body)
        model.set_attn_implementation(IMPLEMENTATION)

    def probe(self, num_tokens: int, longest: int) -> None:
        """Run prompts of `num_tokens` tokens together, of `longest` tokens each.

        Raises UnsupportedModel unless every layer calls attention.
        """
        edges = [*range(0, num_tokens, longest), num_tokens]
        step = EncoderStep(list(pairwise(edges)))
        tokens = np.zeros(num_tokens, dtype=np.int64)
        self._states(tokens, np.arange(num_tokens) % longest, tokens, step)
        if len(step.layers) != self._config.num_hidden_layers:
            raise UnsupportedModel(
                f"{len(step.layers)} of {self._config.num_hidden_layers} layers called the attention function; the "
                "others do their own attention, which rows of several prompts cannot share."
            )

    def hidden_states(self, packed: PackedStep, token_types: Ints) -> torch.Tensor:
        """Return the hidden states `[T, hidden]` of a step's prompts after the last layer."""
        edges = packed.cu_seqlens.tolist()
        positions = self._positions(packed)
        with self.bank.serving(packed.segments, self.bank.extras_of(packed.segments, packed.sampled_rows)):
            return self._states(packed.input_ids, positions, token_types, EncoderStep(list(pairwise(edges))))

    def before_head(self, states: torch.Tensor, packed: PackedStep, rows: Ints) -> torch.Tensor:
        """Return what heads read of `states` `[n, hidden]`, each of a text whose first row of the step is in `rows`,
        ascending."""
        if self._transform is None:
            return states
        segments = None if packed.segments is None else packed.segments.among(torch.from_numpy(rows))
        with self.bank.serving(segments, self.bank.extras_of(segments, packed.sampled_rows)):
            transformed: torch.Tensor = self._transform(states[:, None])
        return transformed.reshape(len(states), -1)

    def classes(self, states: torch.Tensor, slot: int) -> torch.Tensor | None:
        """Return the number of each label for states `[n, hidden]` of `before_head`; None if the model has no head."""
        if slot != BASE_SLOT:
            head = self.bank.classifier_of(slot)
            return None if head is None else head.logits(states, self._activation)
        if self._own_head is None:
            return None
        for index, linear in enumerate(self._own_head):
            states = linear(self._activation(states) if index else states)
        return states

    def classes_of_tokens(self, states: torch.Tensor, packed: PackedStep, first: int, slot: int) -> torch.Tensor | None:
        """Return the numbers of each token of a text, `states` `[n, hidden]` from the step's row `first` on."""
        if slot == BASE_SLOT:  # a head of the checkpoint is one for texts
            return None
        if self._family.has_transform("TOKEN_CLS"):
            states = self.before_head(states, packed, np.arange(first, first + len(states)))
        return self.classes(states, slot)

    def _states(self, input_ids: Ints, positions: Ints, token_types: Ints, step: EncoderStep) -> torch.Tensor:
        device = self.bank.pool.device
        others = {}
        if getattr(self._config, "type_vocab_size", 0) > 1:
            others["token_type_ids"] = to_device(token_types, device)[None]
        states: torch.Tensor = self._body(
            input_ids=to_device(input_ids, device)[None],
            position_ids=to_device(positions, device)[None],
            encoder_step=step,
            **others,
        ).last_hidden_state[0]
        return states

    def _positions(self, packed: PackedStep) -> Ints:
        """Return the positions of a step's tokens.

        If positions begin after the padding token's number, padding tokens are not counted and have that number itself
        (fairseq's positions, as transformers makes them).
        """
        if not self._family.starts_after_padding:
            return packed.position_ids
        padding = self._config.pad_token_id
        counts = packed.input_ids != padding
        before = np.concatenate(([0], np.cumsum(counts)))
        starts = np.repeat(before[packed.cu_seqlens[:-1]], np.diff(packed.cu_seqlens))
        return np.asarray((before[1:] - starts) * counts + padding)


def _detach(model: PreTrainedModel, name: str | None) -> nn.Module | None:
    """Take the module `name` out of the model, which would run it for the rows of a whole step."""
    if name is None:
        return None
    parent, _, attribute = name.rpartition(".")
    module = model.get_submodule(name)
    setattr(model.get_submodule(parent), attribute, None)
    return module


class EncoderRunner:
    """Runs each step to its end."""

    runs_ahead = False
    graphs = StepGraphs()
    image_rows: ImageRows[torch.Tensor] | None = None

    def __init__(
        self, forward: EncoderForward, dense: nn.Sequential, config: PretrainedConfig, family: Encoder, block_size: int
    ) -> None:
        """`dense`: what pooled vectors go through."""
        self.bank = forward.bank
        self._forward = forward
        self._dense = dense
        reads_mean = getattr(config, "classifier_pooling", "cls") == "mean"
        self._classified: Pooling = "mean" if reads_mean else "last" if family.classifies_last else "cls"
        self._block_size = block_size

    @torch.inference_mode()
    def launch(self, step: Step) -> CompletedStep:
        """Compute the vectors and classes of the step's prompts, all of which are whole."""
        packed = pack(step, self._block_size)
        states = self._forward.hidden_states(packed, _token_types(step.chunks))
        found: list[PooledChunk] = []
        classified = []
        for first, chunk in step.pooled:
            rows, name = states[first : first + chunk.length], chunk.sequence.id
            match chunk.sequence.request.pooling:
                case "classify":
                    classified.append((first, chunk, pooled(rows, self._classified).to(rows.dtype)[None]))
                case "token_classify":
                    numbers = self._forward.classes_of_tokens(rows, packed, first, chunk.slot)
                    found.append(PooledChunk(name, _on_host(numbers), (chunk.start, chunk.end)))
                case pooling:
                    vector = self._dense(pooled(rows, pooling or "mean").float())
                    found.append(PooledChunk(name, _on_host(vector)))
        found += self._classes(packed, classified)
        if states.device.type == "cuda":
            torch.cuda.current_stream(states.device).synchronize()
        return CompletedStep([], pooled=PooledVectors(found))

    def forget(self, request_id: str) -> None:
        """Do nothing: no state of a request outlives its step."""

    def _classes(self, packed: PackedStep, classified: list[tuple[int, Chunk, torch.Tensor]]) -> list[PooledChunk]:
        """Return the numbers of each prompt's classes; None: the request's adapter has no head."""
        if not classified:
            return []
        states = torch.cat([state for _, _, state in classified])
        states = self._forward.before_head(states, packed, np.array([first for first, _, _ in classified]))
        return [
            PooledChunk(chunk.sequence.id, _on_host(self._forward.classes(row[None], chunk.slot)))
            for row, (_, chunk, _) in zip(states, classified, strict=True)
        ]


def _on_host(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else to_host(numbers.float().flatten())


def pooled(rows: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return the vector of a text's states `[n, hidden]`: the first, the last or, in float64, the mean."""
    if pooling == "mean":
        return rows.mean(dim=0, dtype=torch.float64)
    return rows[0] if pooling == "cls" else rows[-1]


def _token_types(chunks: Iterable[Chunk]) -> Ints:
    """Return 1 for each token of the second text of a pair, and 0 for all others."""
    parts = []
    for chunk in chunks:
        types = np.zeros(chunk.length, dtype=np.int64)
        if (start := chunk.sequence.request.second_text_at) is not None:
            types[start:] = 1
        parts.append(types)
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class AssembledEncoder:
    """An encoder that is ready to serve."""

    runner: EncoderRunner
    weights: BaseWeights
    facts: ModelFacts
    weight_bytes: int
    choice: FormatChoice | None
    """Format of the linears; None on a GPU."""


def assemble_encoder(
    model: PreTrainedModel, base: BaseDescription, settings: Settings, *, has_head: bool
) -> AssembledEncoder:
    """Make `model`, which `base` describes, ready to serve on its device; its linears are replaced.

    `has_head`: the checkpoint has its own head. Raises UnsupportedModel if `settings` do not fit it.
    """
    family = base.encoder
    assert family is not None, "the caller has asked"
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    width = getattr(model.config, family.width_field)
    dense = read_dense(Path(settings.model.path), width).to(model.device)
    model.add_module("dense_modules", dense)  # a part of the model's digest and of its bytes
    max_model_len = _max_model_len(settings, model.config, family)
    limits = limits_on(model.device, settings.engine)
    sites = sites_of(base, None)
    page_elements = TILES_PER_PAGE * widest_tile(sites)
    page_bytes = page_elements * model.dtype.itemsize
    digest = weights_digest(model, settings.model.quantization)
    no_pool = torch.empty(0, dtype=model.dtype, device=model.device)
    bank = AdapterBank(no_pool, page_elements, sites, settings.adapters.max_rank, 0)
    choice = choose_format(model, sites, settings, is_quantized=False)
    weights = install(model, base, bank, Packing(settings.model.quantization, None if choice is None else choice.form))
    forward = EncoderForward(model, family, bank, has_head=has_head)
    pool = allocate_pool(
        settings, model, weights, page_bytes, _activation_bytes(forward, limits, max_model_len), bank.slot_bytes
    )
    num_pages = len(pool) // page_elements
    bank.use_pool(pool, num_pages)
    facts = ModelFacts(
        max_model_len=max_model_len,
        vocab_size=base.vocab_size,
        eos_token_ids=(),
        dtype=str(model.dtype).removeprefix("torch."),
        pages_total=num_pages,
        block_size=max_model_len,
        kv_cache_dtype="auto",
        weights=digest,
        hidden_size=next((one.out_features for one in reversed(dense) if isinstance(one, nn.Linear)), width),
        limits=limits,
        generates=False,
    )
    others = sum(p.numel() * p.element_size() for p in model.parameters())
    runner = EncoderRunner(forward, dense, model.config, family, max_model_len)
    return AssembledEncoder(runner, weights, facts, others + weights.packed_bytes, choice)


def plan_encoder(
    config: PretrainedConfig, base: BaseDescription, itemsize: int, settings: Settings, card: Card, limits: StepLimits
) -> MemoryPlan:
    """Plan the memory of an encoder on `card`, with `itemsize` bytes an element.

    Raises UnsupportedModel with settings that would fit, if not even one page is left.
    """
    assert base.encoder is not None, "the caller has asked"
    with MODEL_LOCK, torch.device("meta"):
        model = auto_class(config).from_config(config)
    shapes = base.modules.values()
    plan = MemoryPlan(
        num_ranks=1,
        weight_bytes=itemsize * sum(parameter.numel() for parameter in model.parameters()),
        pool_bytes=0,
        page_bytes=itemsize * TILES_PER_PAGE * widest_tile(base.modules),
        adapter_bytes=itemsize * TYPICAL_RANK * sum(shape.in_features + shape.out_features for shape in shapes),
    )
    longest = max(limits.max_num_batched_tokens, _max_model_len(settings, config, base.encoder))
    largest = msgspec.structs.replace(limits, max_num_batched_tokens=longest)
    step = replace(StepMemory.of(base, itemsize), per_sequence=0)  # no logits over the vocabulary
    return fit_on_card(plan, step, settings, card, largest)


def read_dense(directory: Path, width: int) -> nn.Sequential:
    """Return the Dense modules of an encoder's folder, in float32; `width` is that of the pooled vectors.

    Raises UnsupportedModel if they do not fit each other, their files or the model.
    """
    try:
        described = dense_modules(directory)
    except BundleRejected as rejected:
        raise UnsupportedModel(f"{directory}: {rejected.rejection.message}") from None
    parts: list[nn.Module] = []
    for dense in described:
        linear = nn.Linear(dense.in_features, dense.out_features, dense.bias)
        wanted = {f"linear.{name}": list(weight.shape) for name, weight in linear.named_parameters()}
        with safe_open(directory / dense.weights_file, "pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
            if found != wanted or dense.in_features != width:
                raise UnsupportedModel(
                    f"{directory / dense.weights_file} has {found}; its config.json asks for {wanted}, and the vectors "
                    f"before it have {width} numbers. Give the folder as sentence-transformers saved it."
                )
            linear.load_state_dict({name: file.get_tensor(f"linear.{name}") for name in linear.state_dict()})
        parts += [linear, getattr(nn, dense.activation)()]
        width = dense.out_features
    return nn.Sequential(*parts).requires_grad_(False)


@torch.inference_mode()
def _activation_bytes(forward: EncoderForward, limits: StepLimits, max_model_len: int) -> int:
    """Probe the model; return, on a GPU, the memory that the largest step takes outside the pool."""
    device = forward.bank.pool.device
    if device.type != "cuda":
        forward.probe(min(2, max_model_len), max_model_len)
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward.probe(max(limits.max_num_batched_tokens, max_model_len), max_model_len)
    return torch.cuda.max_memory_allocated(device) - before


def _max_model_len(settings: Settings, config: PretrainedConfig, family: Encoder) -> int:
    limit = config.max_position_embeddings - (config.pad_token_id + 1 if family.starts_after_padding else 0)
    wanted = settings.engine.max_model_len or limit
    if wanted > limit:
        raise UnsupportedModel(
            f"engine.max_model_len = {wanted} is more than the {limit} positions that this base has. Set it to {limit} "
            "or less."
        )
    return wanted


def refuse_settings(settings: Settings) -> None:
    """Raise UnsupportedModel for settings that mean nothing for an encoder, or are not served with one."""
    engine = settings.engine
    if engine.tensor_parallel_size > 1:
        raise UnsupportedModel("engine.tensor_parallel_size > 1, and the base is an encoder, which one rank serves.")
    if engine.kv_cache_dtype != "auto":
        raise UnsupportedModel(
            f'engine.kv_cache_dtype = "{engine.kv_cache_dtype}", and the base is an encoder, which keeps no KV; '
            "remove the setting."
        )
