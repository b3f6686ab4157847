"""Measures an engine: the times of its steps over rows, contexts, adapters and ranks, and of its adapters' loads.

A real engine in a separate process answers requests whose steps are known beforehand: requests that came together
decode together, and a prompt alone is a step. So a step's time is the time between two tokens of an answer, or that of
a prompt's first token, and includes planning and the pipe. The first token of a prompt of one token takes longer than
a step that decodes one row, by the time of its way to an idle engine; this time is subtracted.

Each part of the measurement has a share of the time, and ends with it: a slow engine is measured at fewer points.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

import numpy as np
from safetensors.numpy import save_file

from loramux.common.settings.file import Settings
from loramux.engine.client import EngineClient, spawn_engine
from loramux.engine.messages import AdapterRef, ModelFacts, Request, SamplingParams, TokenEvent
from loramux.simulator.fitting import AdapterLoad, LongPrompt, MeasuredStep, StepMeasurements
from loramux.simulator.hardware import Model, StepWork
from loramux.simulator.scenario import ScenarioError
from loramux_adapters.base import describe_base

STEPS = 12
"""Steps of one kind whose median counts."""
MORE_STEPS = 4
"""Steps in addition, because requests that are sent together may begin and end in different steps."""
REPEATS, REPEAT_SHARE = 15, 0.005
"""Maximum number of measurements of one kind, and the share of all time after which there is no further one."""
SHORT, LONG = 8, 2048
"""Tokens of a short prompt, and of the longest."""
LONG_CHUNKS = 3
"""Steps of a prompt that takes several."""
RANKS = (8, 64)
"""Ranks of the measured adapters, as far as the engine allows them."""
ADAPTER_ROWS = 16
ADAPTER_PROMPT = 128
LOADS = 4
POOL_SHARE = 0.4
"""Largest share of the pool that the adapters, or the contexts, of the measurement take."""
SHARES = {"decode": 0.25, "prompts": 0.3, "contexts": 0.15, "adapters": 0.25, "loads": 0.05}
"""Parts of the measurement, and their shares of its time."""

T = TypeVar("T")
Events = list[tuple[float, TokenEvent]]


class EngineSession:
    """A running engine, asked for answers of known sizes."""

    def __init__(self, client: EngineClient, facts: ModelFacts) -> None:
        self.facts = facts
        self._client = client
        self._ids = count()
        self._random = random.Random(0)  # noqa: S311  prompts without common beginnings

    async def answer(
        self, prompts: Sequence[int], tokens: int, adapters: Sequence[AdapterRef | None] = (None,)
    ) -> list[Events]:
        """Send prompts of these lengths at once, with the adapters in turn; return each request's events with the
        seconds after it was sent. Raises ScenarioError if the engine refuses a request.
        """
        answered = asyncio.get_running_loop().create_future()
        arrived: list[Events] = [[] for _ in prompts]
        num_open = len(prompts)
        began = time.perf_counter()

        def keep(events: Events, event: TokenEvent) -> None:
            nonlocal num_open
            events.append((time.perf_counter() - began, event))
            num_open -= event.finish_reason is not None
            if not num_open:
                answered.set_result(None)

        for place, length in enumerate(prompts):
            request = self._request(place, length, tokens, adapters[place % len(adapters)])
            self._client.submit(request, partial(keep, arrived[place]))
        await answered
        for events in arrived:
            if (fault := events[-1][1].fault) is not None:
                raise ScenarioError(f"the engine refused a request of the measurement: {fault.message}")
        return arrived

    def _request(self, place: int, length: int, tokens: int, adapter: AdapterRef | None) -> Request:
        return Request(
            id=f"measurement-{next(self._ids)}",
            tenant=f"measurement-{place}",  # one tenant alone does not get the last rows
            prompt_token_ids=self._random.choices(range(self.facts.vocab_size), k=length),
            sampling=SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, ignore_eos=True),
            adapter=adapter,
        )


@asynccontextmanager
async def running_engine(settings: Settings) -> AsyncIterator[EngineSession]:
    """Start the engine of `settings`, and stop it at the end. Raises EngineDied if it cannot start."""
    client = spawn_engine(settings)
    try:
        yield EngineSession(client, await client.start())
    finally:
        await client.stop()


@dataclass
class EngineMeasurement:
    """Measures one engine within about `seconds`, part by part."""

    engine: EngineSession
    model: Model
    folders: Mapping[int, Path]
    """Folder of an adapter of each rank."""
    seconds: float
    on_part: Callable[[str], None] = lambda _: None
    way_s: float = 0.0
    """Seconds of a request's way to an idle engine and of its token's way back."""
    _numbers: Iterator[int] = field(default_factory=count)

    async def run(self) -> tuple[StepMeasurements, list[AdapterLoad]]:
        """Return the times of steps and of loads. Raises ScenarioError."""
        await self._decode(2, SHORT)  # the first steps of a process take longer
        await self._prompt(SHORT)
        rows = _powers(min(self.engine.facts.limits.max_num_seqs, self._pool_tokens // (4 * SHORT)))
        rows = [1, *rows[:0:-1]]  # the ends first: between measured rows is a line, beyond them a guess
        timed = {number: await self._decode(number, SHORT) for number in self._in_part("decode", rows)}
        decodes = [timed[number] for number in sorted(timed)]
        self.way_s = max(0.0, await self._prompt(1) - decodes[0].seconds)
        lengths = _powers(min(self.engine.facts.limits.max_num_batched_tokens, self._longest))
        points = [*lengths, *_middles(lengths)]
        seconds = {n: await self._prompt(n) - self.way_s for n in self._in_part("prompts", points)}
        prompts = [MeasuredStep(_prompt_work(n), seconds[n]) for n in sorted(seconds)]
        contexts = [
            await self._decode(*point) for point in self._in_part("contexts", self._long_contexts(prompts, decodes))
        ]
        long_prompts = [await self._long_prompt(prompts[-1].work.num_tokens)] if self._takes_several(prompts) else []
        adapters = [step async for step in self._adapter_steps(decodes)]
        loads = [await self._load(rank) for rank in self._in_part("loads", list(self.folders) * LOADS)]
        return StepMeasurements(prompts, decodes, contexts, long_prompts, adapters), loads

    def _in_part(self, name: str, points: Iterable[T]) -> Iterator[T]:
        """Yield points until the part's time is over; at least two."""
        self.on_part(name)
        ends_at = time.perf_counter() + SHARES[name] * self.seconds
        for number, point in enumerate(points):
            if number > 1 and time.perf_counter() > ends_at:
                return
            yield point

    # steps without adapters

    async def _decode(self, rows: int, context: int, adapters: Sequence[AdapterRef | None] = (None,)) -> MeasuredStep:
        """Measure a step that decodes `rows` sequences."""
        measured: list[MeasuredStep] = []
        limit = REPEAT_SHARE * self.seconds
        while len(measured) < REPEATS and sum(STEPS * step.seconds for step in measured) < limit:
            measured.append(await self._decode_once(rows, context, adapters))
        return MeasuredStep(measured[0].work, median(step.seconds for step in measured))

    async def _decode_once(self, rows: int, context: int, adapters: Sequence[AdapterRef | None]) -> MeasuredStep:
        tokens = STEPS + MORE_STEPS + int(rows * context * self._cost_after(context / 2) / self._mixed_tokens)
        while True:
            arrived = await self.engine.answer([context] * rows, tokens, adapters)
            began, ended = max(events[0][0] for events in arrived), min(events[-1][0] for events in arrived)
            together = [(at, place) for place, (at, _) in enumerate(arrived[0]) if began <= at <= ended]
            if len(together) > STEPS // 2:
                break
            # A fast engine makes many steps while the other requests are on their way.
            if context + 2 * tokens > self._longest:
                raise ScenarioError(
                    f"{rows} requests of the measurement did not decode together within {tokens} tokens"
                )
            tokens *= 2
        seconds = median(after[0] - before[0] for before, after in pairwise(together))
        length = context + round(mean(place for _, place in together))
        ranks = [_rank_of(adapters[row % len(adapters)]) for row in range(rows)]
        distinct = ranks[: len(adapters)]
        work = StepWork(
            num_tokens=rows,
            context_tokens=rows * length,
            attention_pairs=rows * length,
            adapter_bytes=self.model.adapter_bytes(1) * sum(distinct),
            adapter_ranks=sum(ranks),
            num_sampled=rows,
            num_adapters=sum(rank > 0 for rank in distinct),
        )
        return MeasuredStep(work, seconds)

    async def _prompt(self, tokens: int, adapter: AdapterRef | None = None) -> float:
        """Return the median seconds from a prompt's sending to its token, on an idle engine."""
        taken: list[float] = []
        while len(taken) < REPEATS and sum(taken) < REPEAT_SHARE * self.seconds:
            [events] = await self.engine.answer([tokens], 1, [adapter])
            taken.append(events[-1][0])
        return median(taken)

    def _long_contexts(self, prompts: Sequence[MeasuredStep], decodes: Sequence[MeasuredStep]) -> list[tuple[int, int]]:
        """Return (rows, tokens of context) that the pool holds, and whose prompts leave time to decode."""
        token_s = prompts[-1].seconds / prompts[-1].work.num_tokens
        affordable = SHARES["contexts"] * self.seconds / 4 / token_s
        measured = [step.work.num_sampled for step in decodes][:5][::-1]
        points = []
        for rows in measured:
            room = float(self._longest - STEPS - MORE_STEPS)
            # An upper bound of the cost, because the context of this point is at most `LONG` and `room`.
            room /= 1 + rows * self._cost_after(min(LONG, room) / 2) / self._mixed_tokens
            points.append((rows, int(min(LONG, room, affordable / rows, self._pool_tokens / rows))))
        return [(rows, context) for rows, context in points if context >= 8 * SHORT]

    def _takes_several(self, prompts: Sequence[MeasuredStep]) -> bool:
        """Return whether the engine's largest step was measured, and a prompt may take several of them."""
        chunk = self.engine.facts.limits.max_num_batched_tokens
        fits = LONG_CHUNKS * chunk <= min(self._longest, self._pool_tokens)
        return prompts[-1].work.num_tokens == chunk and fits

    async def _long_prompt(self, chunk: int) -> LongPrompt:
        return LongPrompt(chunk, LONG_CHUNKS, await self._prompt(LONG_CHUNKS * chunk) - self.way_s)

    # adapters

    async def _adapter_steps(self, decodes: Sequence[MeasuredStep]) -> AsyncIterator[MeasuredStep]:
        rows = min(ADAPTER_ROWS, decodes[-1].work.num_sampled)
        counts = sorted({1, max(1, rows // 4), rows})
        points = [(rank, number) for number in counts for rank in self.folders]
        resident: dict[int, list[AdapterRef]] = {rank: [] for rank in self.folders}
        for rank, number in self._in_part("adapters", points):
            if number * self.model.adapter_bytes(rank) > self._pool_tokens * self.model.kv_bytes_per_token:
                continue
            while len(resident[rank]) < number:
                resident[rank].append(self._new_adapter(rank))
                await self.engine.answer([SHORT], 1, [resident[rank][-1]])
            yield await self._decode(rows, SHORT, resident[rank])
            if number == 1:
                yield await self._decode(1, SHORT, resident[rank])
                tokens = min(ADAPTER_PROMPT, self._longest, self.engine.facts.limits.max_num_batched_tokens)
                seconds = await self._prompt(tokens, resident[rank][0]) - self.way_s
                yield MeasuredStep(_prompt_work(tokens, rank, self.model.adapter_bytes(rank)), seconds)

    async def _load(self, rank: int) -> AdapterLoad:
        """Measure the load of an adapter that the engine has not seen."""
        [events] = await self.engine.answer([SHORT], 1, [self._new_adapter(rank)])
        load = next((event.load for _, event in events if event.load is not None), (0.0, 0.0))
        return AdapterLoad(self.model.adapter_bytes(rank), load[1] - load[0])

    def _new_adapter(self, rank: int) -> AdapterRef:
        """Return a revision that the engine has not seen; revisions of a rank share their files."""
        return AdapterRef(f"r{rank}-{next(self._numbers)}", str(self.folders[rank]))

    @property
    def _mixed_tokens(self) -> int:
        """Tokens of prompts without context that a step takes at least while sequences decode."""
        return self.engine.facts.limits.max_mixed_prefill_tokens

    def _cost_after(self, context: float) -> float:
        """Return how many tokens without context one token after `context` tokens counts as in such a step."""
        unit = self.engine.facts.token_context
        return 1.0 if unit is None else 1.0 + context / unit

    @property
    def _pool_tokens(self) -> int:
        return int(POOL_SHARE * self.engine.facts.pages_total * self.engine.facts.block_size)

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt that leaves a token for its answer."""
        return self.engine.facts.context - 1


def _rank_of(adapter: AdapterRef | None) -> int:
    return 0 if adapter is None else int(adapter.digest[1:].partition("-")[0])


def _prompt_work(tokens: int, rank: int = 0, adapter_bytes: int = 0) -> StepWork:
    """Return the work of one prompt's step."""
    return StepWork(
        num_tokens=tokens,
        context_tokens=tokens,
        attention_pairs=tokens * (tokens + 1) // 2,
        adapter_bytes=adapter_bytes,
        adapter_ranks=tokens * rank,
        num_sampled=1,
        num_adapters=int(rank > 0),
    )


def _powers(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    return [*(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]


def _middles(powers: Sequence[int]) -> list[int]:
    """Return a number between each two, if there is one."""
    return [(low + high) // 2 for low, high in pairwise(powers) if high - low > 1]


def write_adapter(folder: Path, model_path: Path, rank: int) -> None:
    """Write a PEFT adapter with random weights of 16 bits for every linear of the base. Raises BaseUnusable."""
    modules = describe_base(model_path).modules
    rng = np.random.default_rng(rank)
    tensors = {}
    for name, shape in modules.items():
        for part, size in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank))):
            weights = 0.01 * rng.standard_normal(size, dtype=np.float32)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = weights.astype(np.float16)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "base_model_name_or_path": model_path.name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
