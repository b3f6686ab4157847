"""A model without weights: the next token is a function of the adapter and of every token before it.

Its runner keeps what each place of the pool means, and refuses to read KV that was written for another tenant, another
adapter or other tokens. So a wrong page, a wrong slot or a stale prefix shows as soon as it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from loramux.engine.execution.runner import PooledVectors, Pooler, StepGraphs
from loramux.engine.execution.sampler import NO_SCORES
from loramux.engine.memory.residency import Inspected, StoreJob
from loramux.engine.messages import ModelFacts, StepLimits, TokenEvent
from simulation.loop import current_loop, sleep
from simulation.plan import Plan

EOS = 256
VOCABULARY = 260
MAX_MODEL_LEN = 160


class WrongPage(AssertionError):
    """A row read KV or weights that were not written for it."""


def next_token(digest: str | None, token_ids: Sequence[int]) -> int:
    """The token after `token_ids`, with the adapter: a letter, or in one of 24 cases the end.

    After every second prompt it follows from the last token alone: such texts repeat themselves, and drafts are right.
    """
    copies = token_ids[0] % 2
    state = zlib.crc32(repr((digest, *(token_ids[-1:] if copies else token_ids))).encode())
    return EOS if state % 24 == 0 else 97 + state // 24 % 14


def hidden_state(digest: str | None, token_ids: Sequence[int]) -> tuple[float, float]:
    """Return the state after `token_ids`, with the adapter: small integers, whose sums are exact."""
    state = zlib.crc32(repr((digest, *token_ids)).encode())
    return float(state % 1009), float(state // 1009 % 1009)


def vector_of(pooling: str, digest: str | None, token_ids: Sequence[int]) -> bytes:
    """The vector of a whole prompt, by the definition."""
    states = [hidden_state(digest, token_ids[: end + 1]) for end in range(len(token_ids))]
    rows = torch.tensor(states, dtype=torch.float64)
    return bytes((rows.mean(dim=0) if pooling == "mean" else rows[-1]).float().numpy().tobytes())


class SimulatedRunner:
    """Takes `step_seconds` and a little for every token; checks each page that it reads."""

    def __init__(self, plan: Plan, store: SimulatedStore) -> None:
        self.runs_ahead = plan.runs_ahead
        self.graphs = StepGraphs()
        self.bank = SimpleNamespace(
            pool=SimpleNamespace(dtype=None), page_bytes=1 << 16, page_elements=1, bytes_of=lambda slot: 1
        )
        self.places: dict[tuple[int, int], object] = {}
        self.steps = 0
        self._pooler = Pooler(lambda slot: None)
        self._plan = plan
        self._store = store

    def launch(self, step: Any) -> Any:
        self.steps += 1
        self._check_slots(step)
        self._run(step)
        rows = sum(chunk.length for chunk in step.chunks)
        seconds = self._plan.step_seconds * (1.0 + rows / 64)
        sampling, pooled = list(step.sampling), self._pool(step)
        if not self.runs_ahead:
            sleep(seconds)
            return SimpleNamespace(
                sample=lambda: None, scores=NO_SCORES, pooled=pooled, events=lambda: self._events(sampling)
            )
        ready_at = current_loop().time() + seconds

        def wait() -> list[TokenEvent]:
            sleep(max(0.0, ready_at - current_loop().time()))
            return self._events(sampling)

        return SimpleNamespace(sample=lambda: None, scores=NO_SCORES, pooled=pooled, events=wait)

    def forget(self, request_id: str) -> None:
        self._pooler.forget(request_id)

    def _pool(self, step: Any) -> PooledVectors:
        """Pool as the product does, over states that follow from the tokens alone."""
        hidden = torch.zeros(sum(chunk.length for chunk in step.chunks), 2)
        for first, chunk in step.pooled:
            for row in range(chunk.length):
                told = chunk.sequence.token_ids[: chunk.start + row + 1]
                hidden[first + row] = torch.tensor(hidden_state(chunk.sequence.digest, told))
        return self._pooler.pool(hidden, step.pooled)

    def _events(self, sampling: list[Any]) -> list[TokenEvent]:
        """The tokens of chunks, drafts accepted as far as they are those."""
        events = []
        for chunk in sampling:
            sequence = chunk.sequence
            own = sequence.token_ids[: chunk.end - len(chunk.drafts)]
            for draft in (*chunk.drafts, None):
                own = [*own, next_token(sequence.digest, own)]
                ends = own[-1] == EOS and not sequence.request.sampling.ignore_eos
                events.append(
                    TokenEvent(request_id=sequence.id, token_id=own[-1], finish_reason="stop" if ends else None)
                )
                if ends or own[-1] != draft:
                    break
        return events

    def _check_slots(self, step: Any) -> None:
        for chunk in step.chunks:
            digest = chunk.sequence.digest
            served = self._store.digests.get(chunk.slot)
            if served != digest and not (served is None and self._store.invocation(digest)):
                raise WrongPage(f"{chunk.sequence.id} asks for {digest} and runs on {served}")

    def _run(self, step: Any) -> None:
        size = self._plan.block_size
        for pages in self._store.pages.values():
            for page in pages:
                for offset in range(size):
                    self.places[page, offset] = "weights"
        for chunk in step.chunks:
            for position, meaning in self._meanings(chunk):
                if position >= chunk.start:
                    self.places[chunk.sequence.pages[position // size], position % size] = meaning
        for chunk in step.chunks:
            for position, meaning in self._meanings(chunk):
                place = chunk.sequence.pages[position // size], position % size
                if self.places.get(place) != meaning:
                    raise WrongPage(f"{chunk.sequence.id} reads at {position} what was not written for it: {place}")

    def _meanings(self, chunk: Any) -> list[tuple[int, object]]:
        sequence = chunk.sequence
        request = sequence.request
        invocation = self._store.invocation(sequence.digest)
        activation = _last_occurrence(request.prompt_token_ids, invocation) if invocation else None
        own_base = (request.tenant, None, request.cache_scope)
        state = hash(own_base if invocation or not sequence.digest else (request.tenant, sequence.digest, ""))
        found: list[tuple[int, object]] = []
        for position, token in enumerate([*sequence.token_ids, *chunk.drafts][: chunk.end]):
            if position == activation:
                state = hash((state, sequence.digest))
            known = token if token >= 0 else next_token(sequence.digest, sequence.token_ids[:position])
            state = hash((state, known))
            found.append((position, state))
        return found


def _last_occurrence(prompt: Sequence[int], words: tuple[int, ...]) -> int | None:
    places = [i for i in range(len(prompt)) if tuple(prompt[i : i + len(words)]) == words]
    return max(places, default=None)


class SimulatedStore:
    """Loads end after seconds of virtual time, in any order; some of them fail, and some never end."""

    def __init__(self, plan: Plan, delay: Callable[[float, float], float], draw: Callable[[], float]) -> None:
        self.digests: dict[int, str | None] = {}
        """Digests by slot, without slots of the base."""
        self.pages: dict[int, list[int]] = {}
        self.loads = 0
        self._plan = plan
        self._delay = delay
        self._draw = draw

    def invocation(self, digest: str | None) -> tuple[int, ...] | None:
        number = _number(digest)
        return None if number is None else self._plan.invocations[number]

    def num_pages(self, digest: str) -> int:
        number = _number(digest)
        return 1 + zlib.crc32(digest.encode()) % 2 if number is None else self._plan.adapter_pages[number]

    def inspect(self, ref: Any) -> StoreJob[Any]:
        return self._later(lambda: Inspected(self.num_pages(ref.digest), self.invocation(ref.digest)))

    def fill(self, ref: Any, pages: list[int]) -> StoreJob[int]:
        assert len(pages) == self.num_pages(ref.digest)
        self.loads += 1

        def install() -> int:
            slot = next(i for i in range(1000) if i not in self.pages)
            self.pages[slot], self.digests[slot] = pages, ref.digest
            return slot

        return self._later(install)

    def drop(self, slot: int) -> None:
        del self.pages[slot], self.digests[slot]

    def forget(self, digest: str) -> None:
        pass

    num_cached = 0
    cached_bytes = 0

    def close(self) -> None:
        pass

    def _later(self, make: Callable[[], Any]) -> StoreJob[Any]:
        future: StoreJob[Any] = StoreJob()
        future.started_at = current_loop().time()
        fails = self._draw() < self._plan.load_failures
        if self._draw() < self._plan.load_hangs:
            return future

        def conclude() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if fails:
                future.set_exception(OSError("the storage does not answer"))
            else:
                future.set_result(make())

        current_loop().call_later(self._delay(*self._plan.load_seconds), conclude)
        return future


def _number(digest: str | None) -> int | None:
    """Return the number of one of the plan's own adapters; uploaded ones have a real digest."""
    return int(digest[1:]) if digest and digest[0] == "a" and digest[1:].isdecimal() else None


class SimulatedHost:
    """Keeps what swapped pages mean."""

    seconds_per_page = 0.0

    def __init__(self, num_slots: int, block_size: int, places: dict[tuple[int, int], object]) -> None:
        self.num_slots = num_slots
        self._block_size = block_size
        self._pool = places
        self._host: dict[tuple[int, int], object] = {}

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            for offset in range(self._block_size):
                self._host[place, offset] = self._pool.get((page, offset))

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            for offset in range(self._block_size):
                self._pool[page, offset] = self._host.pop((place, offset), None)

    def copy(self, pages: Sequence[int], targets: Sequence[int]) -> None:
        for page, target in zip(pages, targets, strict=True):
            for offset in range(self._block_size):
                self._pool[target, offset] = self._pool.get((page, offset))


def facts(plan: Plan, limits: StepLimits) -> ModelFacts:
    return ModelFacts(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
        dtype="float32",
        pages_total=plan.pages,
        block_size=plan.block_size,
        kv_cache_dtype="auto",
        weights="simulated",
        hidden_size=8,
        limits=limits,
    )
