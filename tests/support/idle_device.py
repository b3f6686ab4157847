"""Engines on a GPU's path whose device does nothing: what remains of a step is the host's part.

Scheduler, runner, packing, sampler and reports are the product's, made as for a GPU. Replaced are the launch of a
kernel, the replay of a recording and the copy to the device: they do nothing. The copy back is one within the host's
memory. So each token is token 0. Operators of torch outside of recordings, for example those of log probabilities, run
on a vocabulary of 260 tokens.

Set TRITON_INTERPRET=1 before this module is imported: on a CPU an engine then takes a GPU's path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import peft
import torch
import transformers
from tiny_base import make_base

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine import engine as engine_module
from loramux.engine.engine import Engine, EngineParts, build_engine
from loramux.engine.execution.cuda_graphs import Recording
from loramux.engine.execution.gpu_runner import GpuRunner
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import AdapterRef, Request, SamplingParams
from loramux_kernels.cuda.launch import Launch

BLOCK, PAGE_BYTES = 16, 4096
"""Tokens and bytes of a page of the base."""
LONGEST = 40_000
"""Maximum number of tokens of a prompt and its answer."""
PREFILL_TOKENS = 2048
OUTPUT = 4000
TENANTS, ADAPTERS = 16, 32


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode in each step."""

    rows: int
    context: int
    """Tokens of the first prompt. The others have up to `BLOCK - 1` more, so that each step takes some new pages."""
    num_adapters: int = 0
    sampling: dict[str, Any] | None = None


def _launch_nothing(_launch: Launch) -> None:
    pass


@contextmanager
def no_launches() -> Iterator[None]:
    """Replace launches of kernels by nothing."""
    with mock.patch.object(Launch, "run", _launch_nothing):
        yield


class IdleDevice:
    """A base and an adapter on disk, and engines that serve them. Use it within `no_launches`."""

    def __init__(self, folder: Path) -> None:
        self._base, self._adapter = make_base(folder / "base", context=LONGEST), folder / "adapter"
        model = transformers.AutoModelForCausalLM.from_pretrained(self._base)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(str(self._adapter))

    def decoding(self, load: Load, clock: Callable[[], float] = time.monotonic) -> Engine:
        """Return an engine in which each row of `load` decodes, and continues to for thousands of steps."""
        pages = load.rows * -(-LONGEST // BLOCK) + 64 * ADAPTERS
        settings = Settings(
            model=ModelSettings(path=str(self._base), served_model_name="base", dtype="float32"),
            engine=EngineSettings(
                device="cpu",
                num_threads=1,
                block_size=BLOCK,
                pool_bytes=pages * PAGE_BYTES,
                swap_bytes=0,
                max_num_seqs=load.rows + load.rows // 4,
                max_num_batched_tokens=PREFILL_TOKENS,
                max_mixed_prefill_tokens=PREFILL_TOKENS,
            ),
        )
        loaded = load_model(settings)
        # A GPU counts no attention of prompts, which would be long in coming.
        loaded = replace(loaded, facts=msgspec.structs.replace(loaded.facts, token_context=None))
        with mock.patch.object(engine_module, "EngineParts", partial(EngineParts, clock=clock)):
            engine = build_engine(loaded, settings, wake=lambda: None)
        stop_replays(engine)
        requests = [self._request(load, row) for row in range(load.rows)]
        # The first request of each tenant and adapter computes the prompt, and the others find it in the prefix cache.
        first = max(TENANTS, load.num_adapters)
        for some in (requests[:first], requests[first:]):
            for request in some:
                engine.submit(request)
            _step_until_all_decode(engine)
        return engine

    def _request(self, load: Load, row: int) -> Request:
        adapter = None
        if load.num_adapters:
            adapter = AdapterRef(digest=f"sha256:{row % load.num_adapters}", path=str(self._adapter))
        length = load.context + row // max(TENANTS, load.num_adapters) % BLOCK
        sampling = {"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True} | (load.sampling or {})
        return Request(
            id=f"{row:032x}",
            tenant=f"tenant {row % TENANTS}",
            prompt_token_ids=[place % 250 for place in range(length)],
            sampling=SamplingParams(**sampling),
            adapter=adapter,
        )


@torch.inference_mode()
def stop_replays(engine: Engine) -> None:
    """Replace the replays of recordings and the copies to the device by nothing."""
    runner = cast(GpuRunner, engine._runner)
    for graphs in (runner._decode_graphs._graphs, runner._decoder_graphs._graphs):
        for key, graph in cast(dict[Any, Any], graphs).items():
            graphs[key] = replace(graph, recording=Recording(_do_nothing, graph.recording.inputs))
    runner._decode_graphs._logits.zero_()  # log probabilities are read from it
    memory = runner._buffers.memory
    memory._memory = memory._memory.to("meta")  # the call of the copy remains


def _do_nothing() -> None:
    pass


def _step_until_all_decode(engine: Engine) -> None:
    waiting = True
    while waiting:
        residency = engine.scheduler.memory.residency
        jobs: list[Any] = [one.pending for one in residency._known.values() if one.pending is not None]
        wait(jobs)
        engine.step()
        sequences = engine.scheduler.state.sequences.values()
        waiting = any(s.num_output_tokens < 2 for s in sequences)
