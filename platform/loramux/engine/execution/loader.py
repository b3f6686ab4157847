"""Loading: a checkpoint becomes a model with a runner and, if there are several ranks, the team of the others.

Before the weights are read, `memory_plan` computes from the files' headers and the config how much of the device's
memory the base will take. The plan is logged, or the base is refused with the settings that would fit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from loramux.common.bundle import SamplingDefaults
from loramux.common.settings.file import Settings
from loramux.engine.execution.assembly import (
    AssembledModel,
    assemble_share,
    choose_device,
    divide,
    load_share,
)
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import (
    LoadingProgress,
    itemsize_of,
    load_checkpoint,
    max_positions,
    read_config,
    sampling_defaults,
)
from loramux.engine.execution.constraints import Constraints, load_vocabulary
from loramux.engine.execution.encoders import AssembledEncoder, assemble_encoder, plan_encoder, refuse_settings
from loramux.engine.execution.memory_plan import (
    Card,
    limits_on,
    loading_alone,
    machine_memory,
    plan_memory,
    plan_on_card,
    pool_bytes_of,
)
from loramux.engine.execution.multi_token import HeadDrafter, refuse_head
from loramux.engine.execution.quantized_checkpoint import format_of
from loramux.engine.execution.rank_team import RankTeam, ranked_weights
from loramux.engine.execution.rank_worker import RankReady, StepsRecorded, WeightsRead
from loramux.engine.execution.runner import CpuRunner, Runner, StepGraphs
from loramux.engine.execution.sampler import Sampler
from loramux.engine.execution.sharded_checkpoint import holds_safetensors
from loramux.engine.execution.states import tells_answers_apart
from loramux.engine.execution.vision import Tower, images_refused
from loramux.engine.messages import LinearFacts, ModelFacts
from loramux_adapters.base import BaseDescription, describe_base
from loramux_adapters.base_weights import BaseWeights
from loramux_adapters.checkpoint_config import is_classifier
from loramux_adapters.families import encoder_of, family_of
from loramux_adapters.sharding import Sharding
from loramux_adapters.tower import linears_of_tower
from loramux_kernels.device import runs_triton

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model that is ready to serve."""

    runner: Runner
    constraints: Constraints | None
    """Constraints of answers; None if grammars cannot read the model's tokenizer."""
    base: BaseDescription
    weights: BaseWeights
    """The base's weights, which adapters are fitted to."""
    facts: ModelFacts
    weight_bytes: int
    """Bytes of weights that a step reads at least once, on each rank."""
    tower: Tower | None = None
    """The model's vision tower; None: prompts have no images."""
    sharding: Sharding | None = None
    """Division of the base among ranks; None: one rank has all."""
    team: RankTeam | None = None
    """The other ranks."""
    head: HeadDrafter | None = None
    """The base's head for multi-token prediction; None: it drafts nothing."""
    tower_linears: Mapping[str, nn.Linear] = field(default_factory=dict)
    """Linears of the tower and its connector, by name."""


def load_model(settings: Settings) -> LoadedModel:
    """Load `settings.model` and give the rest of the memory to one pool; start the other ranks, if any.

    Raises UnsupportedModel for a checkpoint that would be served wrongly, and for settings that do not fit the machine.
    """
    directory = Path(settings.model.path)
    config = read_config(directory)
    if encoder_of(config) is not None:
        return _load_encoder(settings, config)
    if settings.engine.tensor_parallel_size == 1:
        torch.set_num_threads(settings.engine.num_threads or len(os.sched_getaffinity(0)))
        device = choose_device(settings.engine.device)
        refuse_head(settings, config)
        base = describe_base(directory)
        if settings.engine.batch_invariant and device.type == "cuda":
            refuse_batch_invariant(settings, base, config)
        is_planned = settings.model.quantization == "none" and holds_safetensors(directory)
        with loading_alone(device, settings.engine), LoadingProgress(settings.model.served_model_name) as progress:
            if device.type == "cuda" or is_planned:
                _plan(settings, base, Sharding(config, 1), device)
            model = load_checkpoint(directory, settings.model.dtype, device, progress=progress)
            return assemble(model, base, settings, sampling_defaults(directory), progress)
    return _load_ranks(settings, config)


def _load_ranks(settings: Settings, config: PretrainedConfig) -> LoadedModel:
    base, sharding = divide(settings)
    device = choose_device(settings.engine.device)
    refuse_head(settings, config)
    if settings.engine.batch_invariant and device.type == "cuda":
        refuse_batch_invariant(settings, base, config)
    with ExitStack() as locks:
        # In the order of their numbers, so that two engines do not wait for each other.
        for rank in range(sharding.size if device.type == "cuda" else 0):
            locks.enter_context(loading_alone(torch.device("cuda", device.index + rank), settings.engine))
        _plan(settings, base, sharding, device)
        return _start_ranks(settings, base, sharding)


def _start_ranks(settings: Settings, base: BaseDescription, sharding: Sharding) -> LoadedModel:
    team = RankTeam(settings)
    try:
        with LoadingProgress(settings.model.served_model_name) as progress:  # only this rank reports
            share = load_share(settings, 0, team.meeting, progress, meet=lambda: team.wait_for(WeightsRead))
        ready = team.wait_for(RankReady)
        pages = [(share.num_pages, share.forward.bank.page_elements), *((r.num_pages, r.page_elements) for r in ready)]
        if len(set(pages)) > 1:
            raise UnsupportedModel(f"the ranks' pools differ: (pages, elements of a page) are {pages}.")
        weights = ranked_weights(base, share.local_weights, sharding, team, ready)
        defaults = sampling_defaults(Path(settings.model.path))
        return _served(share, base, weights, settings, defaults, sharding, team)
    except BaseException as error:
        team.close()
        if isinstance(error, RuntimeError) and not isinstance(error, UnsupportedModel):
            raise team.explained(error) from error
        raise


def refuse_batch_invariant(settings: Settings, base: BaseDescription, config: PretrainedConfig) -> None:
    """Raise UnsupportedModel if a row's result could depend on the other rows of its step on a GPU."""
    if settings.model.quantization != "none" or format_of(config.to_dict()) is not None:
        reason = "quantized weights are multiplied in tiles that depend on the step"
    elif base.encoder is not None:
        reason = "an encoder's attention is torch's own"
    elif base.parameters:
        reason = "experts are multiplied in tiles that depend on the step"
    elif family_of(config).states is not None:
        reason = "states are computed row by row or in chunks of a prompt"
    else:
        return
    raise UnsupportedModel(f"engine.batch_invariant = true, and {reason}. Remove the setting, or serve a dense base.")


def _load_encoder(settings: Settings, config: PretrainedConfig) -> LoadedModel:
    refuse_settings(settings)
    torch.set_num_threads(settings.engine.num_threads or len(os.sched_getaffinity(0)))
    directory, device = Path(settings.model.path), choose_device(settings.engine.device)
    base = describe_base(directory)
    if settings.engine.batch_invariant and device.type == "cuda":
        refuse_batch_invariant(settings, base, config)
    with loading_alone(device, settings.engine), LoadingProgress(settings.model.served_model_name) as progress:
        if device.type == "cuda":
            card, limits = Card.of(device, settings.engine), limits_on(device, settings.engine)
            itemsize = itemsize_of(config, settings.model.dtype, device)
            plan = plan_encoder(config, base, itemsize, settings, card, limits)
            logger.info("loading %s on %s: %s", settings.model.served_model_name, card, plan)
        model = load_checkpoint(directory, settings.model.dtype, device, progress=progress)
        made = assemble_encoder(model, base, settings, has_head=is_classifier(config.to_dict()))
    logger.info(
        "serving the encoder %s in %s on %s: vectors and classes of texts of up to %d tokens, %d pages for adapters",
        settings.model.served_model_name,
        made.facts.dtype,
        model.device,
        made.facts.max_model_len,
        made.facts.pages_total,
    )
    facts = msgspec.structs.replace(made.facts, linears=_linear_facts(made))
    return LoadedModel(made.runner, None, base, made.weights, facts, made.weight_bytes)


def _plan(settings: Settings, base: BaseDescription, sharding: Sharding, device: torch.device) -> None:
    """Log how much of the device's memory the base will take. Raises UnsupportedModel if that is too much."""
    directory, engine = Path(settings.model.path), settings.engine
    itemsize = itemsize_of(sharding.config, settings.model.dtype, device)
    if device.type == "cuda":
        card = Card.of(device, engine)
        plan = plan_on_card(directory, base, sharding, itemsize, settings, card, limits_on(device, engine))
        logger.info("loading %s on %s: %s", settings.model.served_model_name, card, plan)
        return
    refused = images_refused(directory, sharding.config)
    plan = plan_memory(
        directory,
        base,
        sharding,
        itemsize,
        pool_bytes_of(settings),
        engine,
        image_bytes=engine.image_bytes if refused is None else 0,
    )
    plan.check(machine_memory())
    logger.info("loading %s: %s", settings.model.served_model_name, plan)


def assemble(
    model: PreTrainedModel,
    base: BaseDescription,
    settings: Settings,
    defaults: SamplingDefaults | None = None,
    progress: LoadingProgress | None = None,
) -> LoadedModel:
    """Make `model`, which `base` describes, ready to serve on its device; its linears are replaced.

    Raises UnsupportedModel if `settings` do not fit it.
    """
    share = assemble_share(model, base, settings, progress=progress)
    return _served(share, base, share.local_weights, settings, defaults)


def _served(
    share: AssembledModel,
    base: BaseDescription,
    weights: BaseWeights,
    settings: Settings,
    defaults: SamplingDefaults | None,
    sharding: Sharding | None = None,
    team: RankTeam | None = None,
) -> LoadedModel:
    """Add sampling to rank 0's model; `weights` are those of the whole base."""
    model = share.forward.model
    max_model_len = _max_model_len(settings, model)
    eos = _eos_token_ids(model)
    vocabulary = load_vocabulary(Path(settings.model.path), base.vocab_size, eos)
    constraints = None if vocabulary is None else Constraints(vocabulary, eos)
    runner = _runner(share, eos, max_model_len, constraints, team)
    if team is not None:
        counts = [runner.graphs, *(rank.graphs for rank in team.wait_for(StepsRecorded))]
        runner.graphs = StepGraphs(sum(one.recorded for one in counts), sum(one.missing for one in counts))
    tower = share.tower
    facts = ModelFacts(
        max_model_len=max_model_len,
        vocab_size=base.vocab_size,
        eos_token_ids=eos,
        dtype=str(model.dtype).removeprefix("torch."),
        pages_total=share.num_pages,
        block_size=share.block_size,
        kv_cache_dtype=settings.engine.kv_cache_dtype,
        weights=share.digest,
        state_pages=share.states.num_pages,
        cache_answers=not tells_answers_apart(model),
        hidden_size=base.hidden_size,
        limits=share.limits,
        sampling_defaults=defaults or SamplingDefaults(),
        linears=_linear_facts(share),
        images=tower is not None,
        token_context=share.token_context,
    )
    _log_served(share, facts, settings, team)
    of_tower = {} if tower is None else linears_of_tower(model)
    return LoadedModel(
        runner, constraints, base, weights, facts, share.weight_bytes, tower, sharding, team, share.head, of_tower
    )


def _log_served(share: AssembledModel, facts: ModelFacts, settings: Settings, team: RankTeam | None) -> None:
    states = share.states
    logger.info(
        "serving %s in %s on %s, linears in %s, KV in %s, %.2f GB of weights a step%s: %d pages of %d tokens",
        settings.model.served_model_name,
        facts.dtype,
        share.forward.model.device,
        facts.dtype if settings.model.quantization == "none" else settings.model.quantization,
        facts.dtype if facts.kv_cache_dtype == "auto" else facts.kv_cache_dtype,
        share.weight_bytes / 1e9,
        f" on each of {team.size} ranks" if team is not None else "",
        share.num_pages,
        facts.block_size,
    )
    logger.info(
        "a step has up to %d sequences and %d tokens, %d of them of prompts if sequences decode",
        facts.limits.max_num_seqs,
        facts.limits.max_num_batched_tokens,
        min(facts.limits.max_mixed_prefill_tokens, facts.limits.max_num_batched_tokens),
    )
    if (linears := facts.linears) is not None and linears.bandwidth and linears.floor_s:
        logger.info(
            "memory reads %.1f GB/s: a decode step takes at least %.1f ms (%.0f steps a second) for the weights",
            linears.bandwidth / 1e9,
            1e3 * linears.floor_s,
            1.0 / linears.floor_s,
        )
    if states.layers:
        logger.info(
            "%d layers keep states: each running sequence holds %d pages for them, and so does each cached state "
            "(engine.prefix_cache)",
            len(states.layers),
            states.num_pages,
        )


def _linear_facts(share: AssembledModel | AssembledEncoder) -> LinearFacts | None:
    """Describe the linears of a model on a CPU; None on a GPU."""
    if (choice := share.choice) is None:
        return None
    floor_s = None if choice.bandwidth is None else share.weight_bytes / choice.bandwidth
    return LinearFacts(format=choice.name or "codes", gflops=choice.gflops, bandwidth=choice.bandwidth, floor_s=floor_s)


def _runner(
    share: AssembledModel,
    eos: tuple[int, ...],
    max_model_len: int,
    constraints: Constraints | None,
    team: RankTeam | None,
) -> Runner:
    """Return the runner for the pool's device."""
    forward, pool = share.forward, share.forward.bank.pool
    if not runs_triton(pool):
        return CpuRunner(forward, Sampler(eos), constraints, share.block_size, share.states.num_pages, team, share.head)
    # Imported only if it runs, because it needs triton.
    from loramux.engine.execution.gpu_runner import GpuRunner

    runner = GpuRunner.build(
        *(forward, eos, constraints, share.limits, max_model_len, share.block_size, share.states.num_pages),
        drafter=share.head,
    )
    runner.team = team
    return runner


def _max_model_len(settings: Settings, model: PreTrainedModel) -> int:
    limit = max_positions(model.config)
    config_limit = model.config.get_text_config().max_position_embeddings
    wanted = settings.engine.max_model_len or limit
    if wanted > limit:
        why = "; beyond them its rotary factors depend on each sequence's length" if limit < config_limit else ""
        raise UnsupportedModel(
            f"engine.max_model_len = {wanted} is more than the {limit} positions that this base is served with{why}. "
            f"Set it to {limit} or less."
        )
    if limit < config_limit and not settings.engine.max_model_len:
        logger.warning(
            "max_model_len is %d, not the %d of config.json: beyond it the base's rotary factors would depend on each "
            "sequence's length",
            limit,
            config_limit,
        )
    return wanted


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for config in (model.generation_config, model.config.get_text_config()):
        if (eos := getattr(config, "eos_token_id", None)) is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return ()
