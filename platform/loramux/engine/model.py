"""Loading: a transformers checkpoint becomes a runner, with one pool of memory for its KV and its adapters."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from loramux.engine.attention import KvLayout, UnsupportedModel, probe_layers
from loramux.engine.device_sampler import DeviceSampler
from loramux.engine.forward import Forward
from loramux.engine.messages import ModelFacts
from loramux.engine.runner import ModelRunner, Runner
from loramux.engine.sampler import Sampler
from loramux.settings import Settings
from loramux_adapters import BaseDescription, describe_base
from loramux_adapters.bank import AdapterBank, Site, slot_bytes
from loramux_adapters.base import LinearShape, ParameterShape
from loramux_adapters.base_weights import BaseWeights
from loramux_adapters.experts import part_sites
from loramux_adapters.vocabulary_modules import install
from loramux_kernels import RANK_TILE
from loramux_kernels.device import runs_triton

logger = logging.getLogger(__name__)

SUPPORTED = frozenset(
    (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "mixtral",
        "qwen3_moe",
    )
)
"""`model_type`s whose tokens a test holds against PEFT's; others may call the attention function and still go wrong."""

DEFAULT_CPU_POOL = 2 << 30


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model ready to serve."""

    runner: Runner
    base: BaseDescription
    weights: BaseWeights
    """What adapters are fitted to."""
    facts: ModelFacts
    weight_bytes: int
    """Bytes of weights that a step reads at least once."""


def load_model(settings: Settings) -> LoadedModel:
    """Load `settings.model` and give the rest of the memory to one pool.

    Raises UnsupportedModel for an architecture that would be served wrong, OSError when there is none.
    """
    directory = Path(settings.model.path)
    config = AutoConfig.from_pretrained(directory)
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} has not been shown to give the same tokens here as in transformers; "
            f"supported are {', '.join(sorted(SUPPORTED))}."
        )
    _set_threads(settings.engine.num_threads)
    dtype = "auto" if settings.model.dtype == "auto" else getattr(torch, settings.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(_device(settings.engine.device))
    return assemble(model, describe_base(directory), settings)


def assemble(model: PreTrainedModel, base: BaseDescription, settings: Settings) -> LoadedModel:
    """Make `model`, which `base` describes, ready to serve where it is; its linears are replaced.

    Raises UnsupportedModel where `settings` do not fit it.
    """
    model.eval().requires_grad_(False)
    layout, activation_bytes = _probe(model, settings)
    max_model_len = _max_model_len(settings, model)
    sites = {
        name: Site(i, shape.in_features, shape.out_features) for i, (name, shape) in enumerate(base.modules.items())
    }
    sites |= part_sites(base.parameters, len(sites))
    # The pool is not touched before it is used, so memory that no page ever held is never really taken.
    num_bytes = settings.engine.pool_bytes or DEFAULT_CPU_POOL
    if settings.engine.pool_bytes is None and model.device.type == "cuda":
        num_bytes = _gpu_pool_bytes(settings, model, layout, activation_bytes, len(sites))
    elements = _pool_elements(num_bytes, model, layout)
    pool = torch.empty(elements, dtype=model.dtype, device=model.device)
    num_pages = pool.numel() // layout.page_elements
    _demand_room_for_tiles(base, layout)
    bank = AdapterBank(
        pool, layout.page_elements, sites, settings.adapters.max_rank, max_slots=num_pages, vocabulary=base.vocabulary
    )
    weight_bytes = _bytes_read(model)
    weights = install(model, base.vocabulary, bank)
    eos = _eos_token_ids(model)
    runner = _runner(Forward(model, layout.views(pool), bank), settings, eos, max_model_len)
    facts = ModelFacts(
        max_model_len=max_model_len,
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=eos,
        dtype=str(model.dtype).removeprefix("torch."),
        pages_total=num_pages,
        block_size=settings.engine.block_size,
    )
    logger.info(
        "serving %s in %s on %s: %d pages of %d tokens",
        settings.model.served_model_name,
        facts.dtype,
        model.device,
        num_pages,
        facts.block_size,
    )
    return LoadedModel(runner, base, weights, facts, weight_bytes)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _probe(model: PreTrainedModel, settings: Settings) -> tuple[KvLayout, int]:
    """How the layers' KV lies in a page; and, on a GPU, the memory that the largest step takes beside the pool."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    with torch.inference_mode():
        shapes = probe_layers(model, settings.engine.max_num_batched_tokens if on_gpu else 2)
    peak = torch.cuda.max_memory_allocated(model.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.empty_cache()  # so that what is free is what the driver says is free
    return KvLayout(shapes, settings.engine.block_size), peak - before


def _runner(forward: Forward, settings: Settings, eos: tuple[int, ...], max_model_len: int) -> Runner:
    """What runs steps on the pool's device."""
    engine, pool = settings.engine, forward.bank.pool
    if not runs_triton(pool):
        return ModelRunner(forward, Sampler(eos), engine.block_size)
    # Only where it runs: it needs triton.
    from loramux.engine.gpu_runner import GpuRunner

    return GpuRunner.over(forward, DeviceSampler(eos, pool.device), engine, max_model_len)


def _set_threads(num_threads: int | None) -> None:
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


def _gpu_pool_bytes(
    settings: Settings, model: PreTrainedModel, layout: KvLayout, activation_bytes: int, num_sites: int
) -> int:
    """What gpu_memory_utilization leaves beside weights, activations and a row of the adapters' table for each page."""
    free, total = torch.cuda.mem_get_info(model.device)
    left = int(free - (1 - settings.engine.gpu_memory_utilization) * total) - activation_bytes
    page_bytes = layout.page_elements * model.dtype.itemsize
    return left * page_bytes // (page_bytes + slot_bytes(num_sites, settings.adapters.max_rank))


def _pool_elements(num_bytes: int, model: PreTrainedModel, layout: KvLayout) -> int:
    page_bytes = layout.page_elements * model.dtype.itemsize
    num_pages = num_bytes // page_bytes
    if num_pages < 1:
        raise UnsupportedModel(
            f"A pool of {num_bytes} bytes is less than one page of {page_bytes}; raise engine.pool_bytes"
            f" or, on a GPU, engine.gpu_memory_utilization."
        )
    return num_pages * layout.page_elements


def _demand_room_for_tiles(base: BaseDescription, layout: KvLayout) -> None:
    """A page must hold the widest rank tile, or adapters that are sound could not be loaded."""
    shapes: list[LinearShape | ParameterShape] = [*base.modules.values(), *base.parameters.values()]
    widest = RANK_TILE * max(max(shape.in_features, shape.out_features) for shape in shapes)
    if widest > layout.page_elements:
        needed = -(-widest * layout.block_size // layout.page_elements)
        raise UnsupportedModel(
            f"engine.block_size = {layout.block_size} makes pages too small for this base's adapters; use {needed}+."
        )


def _bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads. Of an embedding that is not the head too, those are but a few rows."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    tied = head is not None and head.weight is embedding
    return sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not embedding)


def _max_model_len(settings: Settings, model: PreTrainedModel) -> int:
    limit = model.config.get_text_config().max_position_embeddings
    wanted = settings.engine.max_model_len or limit
    if wanted > limit:
        raise UnsupportedModel(f"engine.max_model_len = {wanted} is more than the {limit} positions that the base has.")
    return wanted


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for config in (model.generation_config, model.config.get_text_config()):
        if (eos := getattr(config, "eos_token_id", None)) is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return ()
