"""A transformers model becomes a rank's share that can run: its linears serve adapters, its layers read one pool.

On a GPU the pool takes the memory that weights and the largest step leave of the share `gpu_memory_utilization` of the
card; on a CPU it takes `pool_bytes`. Its pages are as large as `block_size` tokens' KV of all layers, and adapters are
in the same pages. With one rank the share is the whole model.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from transformers import PretrainedConfig, PreTrainedModel

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings
from loramux.engine.execution.attention import KvLayout, LayerShape, UnsupportedModel, probe_layers
from loramux.engine.execution.checkpoint import (
    LoadingProgress,
    itemsize_of,
    load_checkpoint,
    max_positions,
    read_config,
    weights_digest,
)
from loramux.engine.execution.fused_layers import fuse_layers
from loramux.engine.execution.memory_plan import Card, limits_on, machine_memory, plan_on_card, pool_bytes_of
from loramux.engine.execution.multi_token import HeadDrafter, MultiTokenHead
from loramux.engine.execution.runner import Forward
from loramux.engine.execution.sharded_checkpoint import CheckpointShare
from loramux.engine.execution.states import StateLayout, install_state_layers, state_unit_bytes
from loramux.engine.execution.vision import NO_EFFECTS, Tower, image_row_shape, images_refused, open_tower
from loramux.engine.messages import StepLimits
from loramux.engine.scheduling.policy import limits_with_images, token_context
from loramux_adapters.bank import AdapterBank, Site, pages_per_slot
from loramux_adapters.base import BaseDescription, LinearShape, ParameterShape, describe_base, expert_name, is_expert
from loramux_adapters.base_weights import BaseWeights, QuantizedExperts, QuantizedLinear
from loramux_adapters.experts import expert_sites
from loramux_adapters.families import images_of, reads_other_inputs
from loramux_adapters.modules import install, linears_shapes
from loramux_adapters.ranks import Ranks, Shard
from loramux_adapters.sharding import Sharding
from loramux_kernels.device import return_freed_memory, runs_triton, zeros_in_large_pages
from loramux_kernels.format_choice import FormatChoice, FormatUnavailable, choose_for_base
from loramux_kernels.packed_linear import Packing
from loramux_kernels.tables import RANK_TILE

logger = logging.getLogger(__name__)

NO_IMAGES = -1
"""Value in the place of `Tower.whole_tokens` if prompts have no images."""

TOUCHED_AT_START = 128 << 20  # bytes of a CPU's pool, a sixteenth of it at most


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """One rank's model (the whole model if there is one rank) with its pool and its adapters."""

    forward: Forward
    local_weights: BaseWeights
    """Base weights of this rank."""
    states: StateLayout
    num_pages: int
    block_size: int
    """Tokens in a page."""
    weight_bytes: int
    digest: str
    choice: FormatChoice | None
    """The format of the linears; None on a GPU."""
    limits: StepLimits
    tower: Tower | None
    """The vision tower, on rank 0; None: prompts have no images."""
    token_context: float | None = None
    """See `ModelFacts`; None on a GPU."""
    head: HeadDrafter | None = None
    """The base's head for multi-token prediction, if it drafts."""


def load_share(
    settings: Settings,
    rank: int,
    meeting: Path,
    progress: LoadingProgress | None = None,
    meet: Callable[[], object] = lambda: None,
) -> AssembledModel:
    """Load the share of `rank`; the ranks find each other by the file `meeting`.

    `meet` is called once the weights are read, before this rank waits for the others in a collective. Raises
    UnsupportedModel, CannotShard.
    """
    directory, engine = Path(settings.model.path), settings.engine
    size, dtype = engine.tensor_parallel_size, settings.model.dtype
    torch.set_num_threads(engine.num_threads or max(1, len(os.sched_getaffinity(0)) // size))
    base, sharding = divide(settings)
    device = choose_device(engine.device, rank)
    if rank and device.type == "cuda":  # rank 0 has planned its own card, before it started this process
        itemsize = itemsize_of(sharding.config, dtype, device)
        card, limits = Card.of(device, engine), limits_on(device, engine)
        plan_on_card(directory, base, sharding, itemsize, settings, card, limits, rank)
    model = load_checkpoint(directory, dtype, device, CheckpointShare(base, sharding, rank), progress)
    meet()
    is_ordered = device.type == "cpu" or engine.batch_invariant
    ranks = Ranks.join(meeting, rank, size, engine.step_timeout_s, device, is_ordered=is_ordered)
    return assemble_share(model, base, settings, Shard(sharding, ranks), progress)


def divide(settings: Settings) -> tuple[BaseDescription, Sharding]:
    """Return the whole base and its division. Raises UnsupportedModel, CannotShard."""
    _check_devices(settings.engine)
    if settings.model.quantization != "none":
        raise UnsupportedModel(
            f"model.quantization = {settings.model.quantization!r} is served by one rank; set "
            f"engine.tensor_parallel_size = 1, or leave the weights as they were saved."
        )
    directory = Path(settings.model.path)
    config = read_config(directory)
    sharding = Sharding(config, settings.engine.tensor_parallel_size)
    base = describe_base(directory)
    sharding.check(base)
    return base, sharding


def _check_devices(engine: EngineSettings) -> None:
    """Raise UnsupportedModel if the ranks of an engine cannot have a GPU each."""
    first, size = find_device(engine.device), engine.tensor_parallel_size
    if first.type == "cpu" or size == 1:
        return
    count = torch.cuda.device_count()
    if first.index + size > count:
        raise UnsupportedModel(
            f"engine.tensor_parallel_size = {size}, and each rank has a GPU of its own, from {first} on: this machine "
            f"has {count}. Set it to {count - first.index} or less, or name an earlier engine.device."
        )
    if engine.in_process:
        raise UnsupportedModel(
            "engine.in_process = true, and the ranks of an engine on GPUs are processes: a rank that waits for another "
            "one while it records a step would stop both. Remove the setting."
        )


def assemble_share(
    model: PreTrainedModel,
    base: BaseDescription,
    settings: Settings,
    shard: Shard | None = None,
    progress: LoadingProgress | None = None,
) -> AssembledModel:
    """Make `model`, which is the share of `shard` in the base, ready to serve."""
    model.eval().requires_grad_(False)
    sites = sites_of(base, shard)
    ranks = None if shard is None else shard.ranks
    limits = limits_on(model.device, settings.engine)
    if ranks is not None:  # their cards may differ
        limits = StepLimits(*(ranks.least(limit) for limit in msgspec.structs.astuple(limits)))
    head = None
    if settings.engine.speculation == "mtp":
        head = MultiTokenHead.load(model, Path(settings.model.path)).to(model.device)
    layout, activation_bytes = _probe(model, settings, limits, widest_tile(sites))
    base_layers = layout.layers if head is None else layout.layers[:-1]
    states = StateLayout.of(model, layout.page_bytes)
    page_elements = layout.page_elements
    # The linears are joined first, because the pool takes the free memory. Until the old form is freed, also in torch's
    # allocator, both forms would reduce the pool.
    no_pool = torch.empty(0, dtype=model.dtype, device=model.device)
    bank = AdapterBank(no_pool, page_elements, sites, settings.adapters.max_rank, 0, base.vocabulary, base.norms)
    _ensure_tiles_fit(sites, layout)
    digest = weights_digest(model, settings.model.quantization)
    if model.device.type == "cpu":
        _copy_out_of_files(model)
    packing, choice = _choose_packing(model, sites, settings)
    pack = partial((progress or LoadingProgress.silent()).track, "packing weights")
    weights = install(model, base, bank, packing, shard, pack)
    if head is not None:
        head.pack(packing, bank)
        weights = replace(weights, packed_bytes=weights.packed_bytes + head.num_bytes)
    weight_bytes = _bytes_read(model) + weights.packed_bytes
    fuse_layers(model, base_layers)
    install_state_layers(model)
    tower, whole_tokens = _open_tower(model, settings, ranks)
    return_freed_memory()
    pages_of_slot = _pages_per_slot(bank, model)
    is_invariant = settings.engine.batch_invariant and runs_triton(no_pool)
    forward = Forward(model, [], bank, is_invariant=is_invariant, ranks=ranks)
    if whole_tokens is None:
        forward.effects = NO_EFFECTS
    else:
        probed, limits = limits.most_rows, limits_with_images(limits, whole_tokens)
        image_bytes = limits.most_rows * math.prod(image_row_shape(model.config)) * model.dtype.itemsize
        activation_bytes = activation_bytes * limits.most_rows // probed + image_bytes
    activation_bytes += 0 if tower is None else tower.gpu_bytes
    measures = model.device.type == "cuda" and settings.engine.pool_bytes is None
    beside = activation_bytes + (_graph_bytes(forward, layout, states, settings, limits, head) if measures else 0)
    pool = allocate_pool(settings, model, weights, layout.page_bytes, beside, bank.slot_bytes / pages_of_slot, ranks)
    num_pages = len(pool) // page_elements
    bank.use_pool(pool, max(1, num_pages // pages_of_slot))
    forward.layers, forward.states = layout.views(pool), states.views(pool)
    context = token_context_of(sites, base, base_layers, model.config) if choice is not None else None
    return AssembledModel(
        forward,
        weights,
        states,
        num_pages,
        layout.block_size,
        weight_bytes,
        digest,
        choice,
        limits,
        tower,
        context,
        None if head is None else HeadDrafter(head, forward, layout, pool, states.num_pages),
    )


def _choose_packing(
    model: PreTrainedModel, sites: Mapping[str, Site], settings: Settings
) -> tuple[Packing, FormatChoice | None]:
    """Return the form of the model's linears in memory, and the choice of their format. Raises UnsupportedModel."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if quantized and settings.model.quantization != "none":
        raise UnsupportedModel(
            f"model.quantization = {settings.model.quantization!r}, and the checkpoint is quantized already; remove it."
        )
    coded_experts = [module for module in quantized if isinstance(module, QuantizedExperts)]
    in_format = {name: site for name, site in sites.items() if not coded_experts or not is_expert(name)}
    choice = choose_format(model, in_format, settings, is_quantized=len(quantized) > len(coded_experts))
    return Packing(settings.model.quantization, None if choice is None else choice.form), choice


def _open_tower(model: PreTrainedModel, settings: Settings, ranks: Ranks | None) -> tuple[Tower | None, int | None]:
    """Return the vision tower, on rank 0 alone, and its `whole_tokens`, on all ranks; None: prompts have no images.

    All ranks must record the same steps, and only rank 0 knows if the tower fits its memory.
    """
    tower = _tower(model, settings) if ranks is None or ranks.rank == 0 else None
    whole_tokens = NO_IMAGES if tower is None else tower.whole_tokens
    whole_tokens = whole_tokens if ranks is None else ranks.first(whole_tokens)
    return tower, None if whole_tokens == NO_IMAGES else whole_tokens


def _tower(model: PreTrainedModel, settings: Settings) -> Tower | None:
    """Return the model's vision tower; None, with a line in the log, if the model has a tower that is not served."""
    directory, name = Path(settings.model.path), settings.model.served_model_name
    if (reason := images_refused(directory, model.config)) is None:
        most_tokens = settings.images.max_tokens
        try:
            tower = open_tower(model, directory)
            tower.measure(most_tokens)
            return tower
        except torch.OutOfMemoryError:
            reason = f"images.max_tokens = {most_tokens}, and such an image does not fit the GPU's memory; lower it"
        except (UnsupportedModel, OSError, ValueError) as error:
            reason = str(error)
    if images_of(model.config.model_type) is not None:
        logger.warning("images in prompts of %s are refused: %s", name, reason)
    return None


def token_context_of(
    sites: Mapping[str, Site], base: BaseDescription, layers: Iterable[LayerShape], config: PretrainedConfig
) -> float | None:
    """Return the tokens of context whose attention costs a token as much as its products with the weights in `sites`;
    None if no layer reads the whole context.

    A token is multiplied by `num_experts_per_tok` of the experts; by all of them if the config does not say so.
    """
    active = getattr(config.get_text_config(), "num_experts_per_tok", None)
    shares = {
        expert_name(name, expert): min(1.0, active / shape.num_experts) if active else 1.0
        for name, shape in base.parameters.items()
        for expert in range(shape.num_experts)
    }
    products = sum(
        site.in_features * site.out_features * shares.get(name, 1.0)
        for name, site in sites.items()
        if not reads_other_inputs(name)
    )
    whole = [layer for layer in layers if layer.options.sliding_window is None]
    return token_context(products, sum(layer.num_heads * (layer.key_dim + layer.value_dim) for layer in whole))


def _copy_out_of_files(model: PreTrainedModel) -> None:
    """Copy the tensors that `install` does not change: embeddings, norms, biases and the vision tower.

    They are in the checkpoint's mapped file. The whole file, as large as all weights, stays in memory while one tensor
    refers to it.
    """
    kept = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or id(parameter) in kept or reads_other_inputs(name):
            parameter.data = parameter.data.clone()


def choose_format(
    model: PreTrainedModel, sites: Mapping[str, Site], settings: Settings, *, is_quantized: bool
) -> FormatChoice | None:
    """Return the format of the model's linears; None on a GPU. Raises UnsupportedModel."""
    if model.device.type != "cpu":
        return None
    is_quantized = is_quantized or settings.model.quantization != "none"
    wanted = settings.engine.linear_format
    try:
        return choose_for_base(linears_shapes(sites), model.dtype, wanted, is_quantized=is_quantized)
    except FormatUnavailable as unavailable:
        raise UnsupportedModel(f"engine.linear_format: {unavailable}; name one of these, or auto.") from unavailable


def sites_of(base: BaseDescription, shard: Shard | None) -> dict[str, Site]:
    """Return the linears that adapters may touch, each as large as this rank's share of it."""
    linears: dict[str, LinearShape] = dict(base.modules)
    parameters: dict[str, ParameterShape] = dict(base.parameters)
    if shard is not None:
        linears = {name: _narrowed(name, shape, shard) for name, shape in linears.items()}
        parameters = {name: _narrowed(name, shape, shard) for name, shape in parameters.items()}
    sites = {name: Site(i, shape.in_features, shape.out_features) for i, (name, shape) in enumerate(linears.items())}
    return sites | expert_sites(parameters, len(sites))


Shape = TypeVar("Shape", LinearShape, ParameterShape)


def _narrowed(name: str, shape: Shape, shard: Shard) -> Shape:
    outputs, inputs = shard.sharding.width(name, shape.out_features, shape.in_features)
    return replace(shape, out_features=outputs, in_features=inputs)


def _graph_bytes(
    forward: Forward,
    layout: KvLayout,
    states: StateLayout,
    settings: Settings,
    limits: StepLimits,
    head: MultiTokenHead | None,
) -> int:
    """Return the GPU memory that recorded steps will keep, from measuring the recordings of the largest steps.

    Graphs hold the pool's address, so those that serve are recorded after the pool was made. The first bucket of rows
    takes the memory that all recordings share; from the second on a bucket takes what its graphs themselves need.
    """
    # Imported only if it runs, because it needs triton.
    from loramux.engine.execution.cuda_graphs import count_recordings
    from loramux.engine.execution.gpu_runner import GpuRunner

    device, bank = forward.model.device, forward.bank
    began = time.monotonic()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    page = torch.zeros(layout.page_elements, dtype=forward.model.dtype, device=device)
    bank.use_pool(page, 1)
    forward.layers, forward.states = layout.views(page), states.views(page)
    longest = settings.engine.max_model_len or max_positions(forward.model.config)
    measured = []
    for buckets in (1, 2):
        runner = GpuRunner.build(
            forward,
            (),
            None,
            limits,
            longest,
            layout.block_size,
            states.num_pages,
            most_buckets=buckets,
            drafter=None if head is None else HeadDrafter(head, forward, layout, page, states.num_pages),
        )
        torch.cuda.empty_cache()
        measured.append((sum(runner.graphs), before - torch.cuda.mem_get_info(device)[0]))
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    recordings = count_recordings(
        limits.max_num_seqs,
        limits.most_rows,
        is_invariant=forward.is_invariant,
        has_images=forward.effects.reaches_layers,
        has_head=head is not None,
    )
    taken = extrapolate(measured[0], measured[1], recordings)
    logger.info("recorded steps will take %.2f GB; measured in %.1f s", taken / 1e9, time.monotonic() - began)
    return taken


def extrapolate(first: tuple[int, int], second: tuple[int, int], recordings: int) -> int:
    """Return the bytes of `recordings`, of which two measurements give some (number, bytes); never less than these."""
    growth = max(0, second[1] - first[1]) / max(1, second[0] - first[0])
    return int(max(first[1], second[1]) + growth * max(0, recordings - second[0]))


def allocate_pool(
    settings: Settings,
    model: PreTrainedModel,
    weights: BaseWeights,
    page_bytes: int,
    beside: int,
    table_bytes: float,
    ranks: Ranks | None = None,
) -> torch.Tensor:
    """Return the pool. On a GPU it leaves `beside` bytes of the engine's share for activations and graphs, and each
    page needs `table_bytes` of adapter tables. With `ranks` it has the pages that every one of them has memory for.

    On a CPU only the pool's first pages are touched, because the machine may take milliseconds to find each 2 MiB and
    the first requests should not wait for that. The system never commits the memory of pages that are not used.
    """
    num_bytes = pool_bytes_of(settings)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # so that the driver reports all memory that is free
        if settings.engine.pool_bytes is None:
            held = sum(p.numel() * p.element_size() for p in model.parameters()) + weights.packed_bytes
            left = Card.of(model.device, settings.engine).left(held) - beside
            num_bytes = int(left * page_bytes / (page_bytes + table_bytes))
    elements = _pool_elements(num_bytes, model, page_bytes, ranks)
    if model.device.type == "cpu":
        pool = zeros_in_large_pages(elements, model.dtype)
        pool[: min(elements // 16, TOUCHED_AT_START // model.dtype.itemsize)].zero_()
        return pool
    return torch.empty(elements, dtype=model.dtype, device=model.device)


def _pages_per_slot(bank: AdapterBank, model: PreTrainedModel) -> int:
    """Return the number of pages for which there is one slot; on a CPU, unused tables take no memory."""
    if model.device.type == "cpu":
        return 1
    return pages_per_slot(bank.page_elements * model.dtype.itemsize, bank.slot_bytes)


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Return the device of a rank of an engine whose `engine.device` is `name`, and make it the current one of this
    thread.

    Streams, events and Triton launches go to the current device: a model on cuda:1 under device 0 would mix both.
    """
    device = find_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index + rank)
        torch.cuda.set_device(device)
    return device


def find_device(name: str) -> torch.device:
    """Return the device that `engine.device` names: rank 0's. Raises UnsupportedModel."""
    has_gpu = torch.cuda.is_available()
    kind, _, index = ("cuda" if has_gpu else "cpu", "", "") if name == "auto" else name.partition(":")
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind != "cuda" or not (index.isdecimal() or name in ("auto", "cuda")):
        raise UnsupportedModel(f"engine.device = {name!r} is not one of auto, cpu, cuda and cuda:0, cuda:1, ...")
    if not has_gpu:
        raise UnsupportedModel(
            f"engine.device = {name!r}, and torch sees no GPU: check the driver and the build of torch, or set cpu."
        )
    if int(index or 0) >= torch.cuda.device_count():
        raise UnsupportedModel(f"engine.device = {name!r}, and this machine has {torch.cuda.device_count()} GPUs.")
    return torch.device("cuda", int(index or 0))


def _probe(model: PreTrainedModel, settings: Settings, limits: StepLimits, widest: int) -> tuple[KvLayout, int]:
    """Return the KV's layout in a page and, on a GPU, the memory that the largest step takes outside the pool.

    `widest` is the number of elements of the widest rank tile, which a page must hold.
    """
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    with torch.inference_mode():
        shapes = probe_layers(model, limits.max_num_batched_tokens if on_gpu else 2)
    peak = torch.cuda.max_memory_allocated(model.device) if on_gpu else 0
    is_fp8 = settings.engine.kv_cache_dtype == "fp8"
    held = max(widest, -(-state_unit_bytes(model) // model.dtype.itemsize))
    layout = KvLayout(shapes, 1, model.dtype.itemsize, is_fp8)
    if settings.engine.speculation == "mtp":
        layout = layout.with_head(model.config.get_text_config().hidden_size)
    return layout.with_block_size(settings.engine.block_size, held), peak - before


def widest_tile(sites: Mapping[str, LinearShape | ParameterShape | Site]) -> int:
    """Return the elements of the widest rank tile that adapters of `sites` have in the pool: a tower's have none."""
    of_text = [site for name, site in sites.items() if not reads_other_inputs(name)]
    return RANK_TILE * max(max(site.in_features, site.out_features) for site in of_text)


def _pool_elements(num_bytes: int, model: PreTrainedModel, page_bytes: int, ranks: Ranks | None) -> int:
    num_ranks = 1 if ranks is None else ranks.size
    # Before any refusal, so that all ranks refuse.
    num_pages = num_bytes // page_bytes if ranks is None else ranks.least(num_bytes // page_bytes)
    if model.device.type == "cpu" and num_bytes * num_ranks > (memory := machine_memory()):
        raise UnsupportedModel(
            f"engine.pool_bytes = {num_bytes}, for each of {num_ranks} ranks, is more than this machine's {memory} "
            f"bytes of memory: the engine would be killed as the pool fills. Set what the weights and the rest of the "
            f"server leave."
        )
    if num_pages < 1:
        raise UnsupportedModel(
            f"A pool of {num_bytes} bytes is less than one page of {page_bytes}; raise engine.pool_bytes"
            f" or, on a GPU, engine.gpu_memory_utilization."
        )
    return num_pages * page_bytes // model.dtype.itemsize


def _ensure_tiles_fit(sites: Mapping[str, Site], layout: KvLayout) -> None:
    """Refuse pages that cannot hold the widest rank tile, because valid adapters could not be loaded."""
    widest = widest_tile(sites)
    if widest > layout.page_elements:
        raise UnsupportedModel(
            f"engine.block_size = {layout.block_size} makes pages too small for this base's adapters; use "
            f"{layout.block_size_for(widest)}+."
        )


def _bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a step reads: all but an embedding that is not also the head, and a tower."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    tied = head is not None and head.weight is embedding
    read = (p for name, p in model.named_parameters() if not reads_other_inputs(name))
    return sum(p.numel() * p.element_size() for p in read if tied or p is not embedding)
