"""The plan of memory: whether a base fits its device, known from the files' headers and the config in a second.

On a CPU the weights and the pool of every rank must fit the machine. On a GPU an engine has a share of the card. The
weights, the largest step and recorded steps come out of the share, and the pool is what is left. Recorded steps are
measured after loading, so a plan of a GPU's pool is an upper bound.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings
from loramux.engine.execution.attention import KvLayout, UnsupportedModel, probe_layers
from loramux.engine.execution.multi_token_checkpoint import StoredHead
from loramux.engine.execution.quantized_checkpoint import format_of, held_bytes, quantized_linears, whole_shape
from loramux.engine.execution.sharded_checkpoint import empty_model, holds_safetensors, sharded_tensors
from loramux.engine.messages import StepLimits
from loramux.engine.scheduling.policy import step_limits
from loramux_adapters.base import BaseDescription, LinearShape
from loramux_adapters.families import reads_other_inputs
from loramux_adapters.latent import expansion_elements
from loramux_adapters.sharding import Sharding
from loramux_adapters.targets import MAX_ADDED_TOKENS
from loramux_kernels.tables import RANK_TILE

GB = 1e9
COUNT_BYTES = 4
TYPICAL_RANK = 64
"""Rank of the adapters that a memory plan counts."""
DEFAULT_CPU_POOL = 2 << 30
LEAST_STEP_TOKENS = 64
"""A smaller `max_num_batched_tokens` is no way out of a lack of memory."""


def pool_bytes_of(settings: Settings) -> int:
    """Return the bytes of a rank's pool on a CPU."""
    return settings.engine.pool_bytes or DEFAULT_CPU_POOL


def machine_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's memory, of which this engine has a share."""

    name: str
    total: int
    free: int
    """Bytes that no process holds now."""
    utilization: float
    """Share of `total` for all engines of the server on this card."""
    num_engines: int
    """Engines that divide this share."""

    @classmethod
    def of(cls, device: torch.device, engine: EngineSettings) -> Card:
        """Ask the driver for the memory of `device`."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(str(device), total, free, engine.gpu_memory_utilization, engine.engines_per_device or 1)

    def __str__(self) -> str:
        divided = f" for {self.num_engines} engines" if self.num_engines > 1 else ""
        return (
            f"{self.name}, which has {self.total / GB:.1f} GB, of them {self.free / GB:.1f} GB free, with "
            f"engine.gpu_memory_utilization = {self.utilization:g}{divided}"
        )

    def left(self, held: int) -> int:
        """Return the bytes that an engine may still take if it holds `held` bytes already.

        What other processes hold reduces it only if the card's reserve, outside `utilization`, would be used.
        """
        share = self.utilization * self.total / self.num_engines
        return int(min(share - held, self.free - (1 - self.utilization) * self.total))

    def utilization_for(self, num_bytes: int) -> float:
        """Return the least utilization with which `left(0)` is `num_bytes`, in hundredths; above 1 if there is none."""
        used = self.total - self.free
        return math.ceil(100 * max(self.num_engines * num_bytes, num_bytes + used) / self.total) / 100


def limits_on(device: torch.device, engine: EngineSettings) -> StepLimits:
    """Return the limits of a step of an engine on `device`."""
    if device.type != "cuda":
        return step_limits(engine, None)
    card = Card.of(device, engine)
    return step_limits(engine, card.total // card.num_engines)


@contextmanager
def loading_alone(device: torch.device, engine: EngineSettings) -> Iterator[None]:
    """Wait until no other of the engines that divide `device` loads, because an engine measures its recorded steps by
    the card's free memory."""
    if device.type != "cuda" or (engine.engines_per_device or 1) == 1:
        yield
        return
    name = f"loramux-{os.getuid()}-{torch.cuda.get_device_properties(device).uuid}.lock"
    lock = os.open(Path(tempfile.gettempdir()) / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of every rank of an engine; the plan of another card than rank 0's has no tower."""

    num_ranks: int
    weight_bytes: int
    """Bytes of weights of every rank, without those of `tower_bytes`."""
    pool_bytes: int
    page_bytes: int
    """Bytes of a page; 0 if it is not known without the weights."""
    adapter_bytes: int
    """Bytes of an adapter of TYPICAL_RANK on all linears."""
    is_quantized: bool = False
    tower_bytes: int = 0
    """Bytes of the modules that read images or sound, which rank 0 alone has."""
    image_bytes: int = 0
    """Bytes for images, as the vision tower has computed them."""
    step_bytes: int = 0
    """Least bytes that the largest step takes outside the pool; counted on a GPU."""
    expansion_bytes: int = 0
    """Bytes for expanding compressed KV on a CPU: the linears that do so once more, and keys and values of a block."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        of_each = self.weight_bytes + self.pool_bytes + self.expansion_bytes
        return self.num_ranks * of_each + self.tower_bytes + self.image_bytes

    @property
    def largest_weight_bytes(self) -> int:
        """Bytes of the weights of the rank that has the most."""
        return self.weight_bytes + self.tower_bytes

    def __str__(self) -> str:
        pages = f" = {self.pool_bytes // self.page_bytes:,} pages" if self.page_bytes else ""
        adapters = self.pool_bytes // self.adapter_bytes if self.adapter_bytes else 0
        where = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        on_first = " on rank 0" if self.num_ranks > 1 else ""
        tower = f", vision tower {self.tower_bytes / GB:.1f} GB{on_first}" if self.tower_bytes else ""
        images = f", images {self.image_bytes / GB:.1f} GB" if self.image_bytes else ""
        step = f"largest step {self.step_bytes / GB:.1f} GB, " if self.step_bytes else ""
        return (
            f"weights {self.weight_bytes / GB:.1f} GB, {step}pool {self.pool_bytes / GB:.1f} GB{pages}, "
            f"or {adapters:,} adapters of rank {TYPICAL_RANK} on all linears{where}{tower}{images}"
        )

    def check(self, memory: int) -> None:
        """Raise UnsupportedModel if the machine's `memory` bytes are too few; the message names settings that would
        fit."""
        if self.total_bytes <= memory:
            return
        left = (memory - self.tower_bytes) // self.num_ranks - self.weight_bytes - self.expansion_bytes
        if left >= max(self.page_bytes, 1) and self.image_bytes:
            way_out = f"set engine.pool_bytes and engine.image_bytes to {left} or less together"
        elif left >= max(self.page_bytes, 1):
            way_out = f"set engine.pool_bytes to {left} or less"
        elif self.is_quantized:
            way_out = "the weights alone are too large: give a checkpoint of fewer bits, or a larger machine"
        elif self.num_ranks > 1:
            way_out = "the weights alone are too large, and all ranks share this machine: give a larger one"
        else:
            way_out = 'the weights alone are too large: set model.quantization = "int8" or "nf4"'
        raise UnsupportedModel(
            f"{self} do not fit this machine's {memory / GB:.1f} GB of memory; {way_out}. (What other processes and "
            f"the step itself take comes on top.)"
        )


def plan_memory(
    directory: Path,
    base: BaseDescription,
    sharding: Sharding,
    itemsize: int,
    pool_bytes: int,
    engine: EngineSettings,
    *,
    image_bytes: int = 0,
) -> MemoryPlan:
    """Plan the memory of weights and keys with `itemsize` bytes an element, and of codes as they are held.

    `pool_bytes` replaces the setting in `engine`.

    Raises UnsupportedModel if the files are not safetensors.
    """
    widths = {name: sharding.width(name, s.out_features, s.in_features) for name, s in _linears_of_text(base).items()}
    weight_bytes, tower_bytes = _weight_bytes(directory, base, sharding, itemsize, has_head=engine.speculation == "mtp")
    return MemoryPlan(
        sharding.size,
        weight_bytes,
        pool_bytes,
        _page_bytes(sharding, engine, RANK_TILE * max(map(max, widths.values())), itemsize),
        TYPICAL_RANK * itemsize * sum(map(sum, widths.values())),
        is_quantized=format_of(vars(sharding.config)) is not None,
        tower_bytes=tower_bytes,
        image_bytes=image_bytes,
        expansion_bytes=itemsize * expansion_elements(widths),
    )


def _linears_of_text(base: BaseDescription) -> dict[str, LinearShape]:
    """Return the linears that steps compute, and whose adapters are in the pool."""
    return {name: shape for name, shape in base.modules.items() if not reads_other_inputs(name)}


def _weight_bytes(
    directory: Path, base: BaseDescription, sharding: Sharding, itemsize: int, *, has_head: bool
) -> tuple[int, int]:
    """Return the bytes of every rank's weights, and of those that rank 0 alone has: of the model if the files are no
    safetensors, else of the files."""
    sizes: Counter[str] = Counter()
    if sharding.size == 1 and not holds_safetensors(directory):
        sizes.update({name: itemsize * one.numel() for name, one in empty_model(sharding).named_parameters()})
    else:
        form = format_of(vars(sharding.config))
        quantized = () if form is None else quantized_linears(directory, sharding.config, form)
        with sharded_tensors(directory, sharding, 0, without=quantized) as tensors:
            sizes.update({name: itemsize * math.prod(one.get_shape()) for name, one in tensors.items()})
        if has_head:
            sizes["head for multi-token prediction"] = StoredHead.of(directory).num_bytes(itemsize)
        shapes = ((name, whole_shape(base, name)) for name in quantized)
        known = {name: shape for name, shape in shapes if shape is not None}  # loading refuses other linears
        for name, num_bytes in held_bytes(directory, known).items():
            shape = known[name]
            share = math.prod(sharding.width(name, shape.out_features, shape.in_features))
            sizes[name] += num_bytes * share // shape.num_weights
    tower_bytes = sum(size for name, size in sizes.items() if reads_other_inputs(name))
    loads_text_alone = sharding.config.get_text_config() is sharding.config
    return sizes.total() - tower_bytes, 0 if loads_text_alone else tower_bytes


def _page_bytes(sharding: Sharding, engine: EngineSettings, widest: int, itemsize: int) -> int:
    """Return the bytes of a page, found by a forward on the meta device; 0 for models whose forward needs values."""
    try:
        # In bfloat16, because torch's product of a mixture's experts takes no float32 on the meta device.
        layers = probe_layers(empty_model(sharding).to(torch.bfloat16))
        layout = KvLayout(layers, 1, itemsize, engine.kv_cache_dtype == "fp8")
        if engine.speculation == "mtp":
            layout = layout.with_head(sharding.config.get_text_config().hidden_size)
        return layout.with_block_size(engine.block_size, widest).page_bytes
    except UnsupportedModel:  # some mixtures: which experts compute depends on values
        return 0


def plan_on_card(
    directory: Path,
    base: BaseDescription,
    sharding: Sharding,
    itemsize: int,
    settings: Settings,
    card: Card,
    limits: StepLimits,
    rank: int = 0,
) -> MemoryPlan:
    """Plan the memory of `rank` on `card`, whose pool is at most what the weights and the largest step leave.

    Raises UnsupportedModel with settings that would fit, if not even one page is left.
    """
    plan = plan_memory(directory, base, sharding, itemsize, 0, settings.engine)
    if rank:
        plan = replace(plan, tower_bytes=0)
    return fit_on_card(plan, StepMemory.of(base, itemsize, sharding), settings, card, limits)


def fit_on_card(plan: MemoryPlan, step: StepMemory, settings: Settings, card: Card, limits: StepLimits) -> MemoryPlan:
    """Return `plan` with steps of `limits`, and with the pool that they leave on `card`.

    Raises UnsupportedModel with settings that would fit, if not even one page is left.
    """
    engine = settings.engine
    plan = replace(plan, step_bytes=step.largest(limits))
    beside = plan.largest_weight_bytes + plan.step_bytes
    if settings.model.quantization != "none":  # the weights are whole on the card until they are quantized
        needed, available = plan.largest_weight_bytes, card.free
    elif engine.pool_bytes is not None:
        needed, available = beside + engine.pool_bytes, card.free
    else:
        needed, available = beside + max(plan.page_bytes, 1), card.left(0)
    plan = replace(plan, pool_bytes=engine.pool_bytes or max(0, available - beside))
    if needed > available:
        is_whole = settings.model.quantization == "none"
        setting = _setting_that_fits(plan, step, limits, engine, card, needed, available) if is_whole else None
        way_out = setting or _way_out(plan, card, needed, can_quantize=is_whole)
        raise UnsupportedModel(f"{plan}, do not fit {card}; {way_out}.")
    return plan


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Least bytes of a step's tensors outside the pool."""

    per_token: int
    """Bytes of a token: inputs and outputs of the two widest linears together."""
    per_sequence: int
    """Bytes of a sequence: its logits, also in float32, and the counts of its tokens (`TokenCounts`)."""

    @classmethod
    def of(cls, base: BaseDescription, itemsize: int, sharding: Sharding | None = None) -> StepMemory:
        """Return the bytes for a base, or for a rank's share of it, whose elements have `itemsize` bytes."""
        shapes = {name: (shape.out_features, shape.in_features) for name, shape in _linears_of_text(base).items()}
        widest = max(sum(shape if sharding is None else sharding.width(name, *shape)) for name, shape in shapes.items())
        counts = base.vocab_size + MAX_ADDED_TOKENS
        return cls(2 * itemsize * widest, (itemsize + 4) * base.vocab_size + COUNT_BYTES * counts)

    def largest(self, limits: StepLimits) -> int:
        """Return the bytes of the largest step."""
        return limits.most_rows * self.per_token + limits.max_num_seqs * self.per_sequence

    def setting_for(self, num_bytes: int, limits: StepLimits) -> str | None:
        """Return the change of the limits of a step with which it takes at most `num_bytes`; None if they would be
        useless."""
        sequences = limits.max_num_seqs
        tokens = (num_bytes - sequences * self.per_sequence) // self.per_token
        if tokens >= max(sequences, LEAST_STEP_TOKENS):
            return f"set engine.max_num_batched_tokens to {tokens} or less"
        both = num_bytes // (self.per_token + self.per_sequence)
        if both >= LEAST_STEP_TOKENS:
            return f"set engine.max_num_batched_tokens and engine.max_num_seqs to {both} or less"
        return None


def _setting_that_fits(
    plan: MemoryPlan,
    step: StepMemory,
    limits: StepLimits,
    engine: EngineSettings,
    card: Card,
    needed: int,
    available: int,
) -> str | None:
    """Return the change of the engine's settings with which the plan fits; None if there is none."""
    page = max(plan.page_bytes, 1)
    left = card.free - plan.largest_weight_bytes - plan.step_bytes
    if engine.pool_bytes is not None and left >= page:
        return f"set engine.pool_bytes to {left} or less"
    setting = step.setting_for(available - plan.largest_weight_bytes - (engine.pool_bytes or page), limits)
    if setting is None and engine.pool_bytes is None and (utilization := card.utilization_for(needed)) <= 1:
        return f"set engine.gpu_memory_utilization to {utilization:g} or more"
    return setting


def _way_out(plan: MemoryPlan, card: Card, needed: int, *, can_quantize: bool) -> str:
    """Return the change of the machine or of the weights with which the plan fits."""
    if card.num_engines > 1 and replace(card, num_engines=1).left(0) >= needed:
        return f"{card.num_engines} engines divide this GPU: let fewer use it (engines.devices, engines.max)"
    if replace(card, free=card.total, num_engines=1).left(0) >= needed:
        held = (card.total - card.free) / GB
        return f"other processes hold {held:.1f} GB of it: end them, or name another GPU (engine.device)"
    if plan.is_quantized:
        return "the weights alone are too large: give a checkpoint of fewer bits, or a larger GPU"
    if can_quantize and plan.largest_weight_bytes <= card.free:
        return 'the weights are too large: set model.quantization = "int8" or "nf4"'
    return "the weights alone are too large, also to be quantized there: give a quantized checkpoint, or a larger GPU"
