"""The requests of a simulation in the order in which they arrive: drawn from clients, or read from a log.

`draw_arrivals` draws the requests of a scenario's clients. `read_workload` reads the workload of a plan: a log of
requests (JSON lines or CSV), or a TOML description of the traffic.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from loramux.engine.messages import AdapterRef, Request, SamplingParams, ServiceClass
from loramux.simulator.hardware import Count
from loramux.simulator.scenario import Client, Conversation, Rng, ScenarioError, arrival_times, choose, with_pauses

INVOCATION = -(1 << 31)
"""Token of the invocations, which no prompt has at another place."""


@dataclass(frozen=True, slots=True)
class TrafficSource:
    """The properties that requests of one tenant and adapter share."""

    tenant: str
    adapter: AdapterRef | None
    rank: int
    service_class: ServiceClass
    weight: float
    deadline_s: float | None
    preload: bool
    system_tokens: int = 0
    """Tokens with which all prompts begin."""
    base: str = ""
    """Name of the base that answers the requests; empty: the only one."""
    invocation: tuple[int, ...] = ()
    """Tokens that activate the adapter; empty: it is no activated LoRA."""


StageName = Literal["first turn", "evaluation", "later turn"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A request of a conversation after the first one."""

    name: StageName
    source: TrafficSource
    prompt_tokens: int
    """Tokens of the conversation's context, and of the invocation."""
    output_tokens: int
    max_tokens: int
    invocation: tuple[int, ...] = ()
    """Tokens at the end of the prompt that are in no other stage's context."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in order of arrival, as columns. A request may begin a conversation."""

    sources: list[TrafficSource]
    source: np.ndarray
    """int64[n], index into `sources`."""
    at: np.ndarray
    """float64[n], seconds."""
    prompt_tokens: np.ndarray
    """int64[n]"""
    output_tokens: np.ndarray
    """int64[n]"""
    max_tokens: np.ndarray
    """int64[n]"""
    conversations: np.ndarray | None = None
    """object[n], tuples of the stages after the first, or None for a single request; None: only single requests."""

    def __len__(self) -> int:
        return len(self.at)

    @property
    def adapters(self) -> dict[AdapterRef, int]:
        """Rank of every adapter."""
        return {source.adapter: source.rank for source in self.sources if source.adapter}

    @property
    def invocations(self) -> dict[str, tuple[int, ...]]:
        """Invocations of the activated LoRAs, by digest."""
        return {one.adapter.digest: one.invocation for one in self.sources if one.adapter and one.invocation}

    @property
    def num_requests(self) -> int:
        """Number of requests, with those of conversations."""
        return len(self) + sum(1 for _ in self._later())

    @property
    def most_units(self) -> int:
        """Units of the largest request at its maximum length: a prompt token is one unit, a generated token two."""
        first = int((self.prompt_tokens + 2 * self.max_tokens).max())
        return max([first, *(stage.prompt_tokens + 2 * stage.max_tokens for stage in self._later())])

    def _later(self) -> Iterator[Stage]:
        for row in range(len(self) if self.conversations is not None else 0):
            yield from self.stages(row) or ()

    def stages(self, row: int) -> tuple[Stage, ...] | None:
        """Return the stages after the first of the conversation that a row begins; None: it is a single request."""
        stages: tuple[Stage, ...] | None = None if self.conversations is None else self.conversations[row]
        return stages

    @property
    def preloaded(self) -> list[AdapterRef]:
        """Adapters that are in the pool from the beginning."""
        return [source.adapter for source in self.sources if source.adapter and source.preload]

    def only(self, which: np.ndarray) -> Arrivals:
        """Return the arrivals that `which` selects, bool[n] or int64[k]."""
        return Arrivals(
            self.sources,
            self.source[which],
            self.at[which],
            self.prompt_tokens[which],
            self.output_tokens[which],
            self.max_tokens[which],
            None if self.conversations is None else self.conversations[which],
        )

    def of_base(self, base: str) -> Arrivals:
        """Return the requests to one base. Raises ScenarioError if there is none."""
        wanted = np.array([source.base == base for source in self.sources])[self.source]
        if not wanted.any():
            names = ", ".join(sorted({source.base or "(none)" for source in self.sources}))
            raise ScenarioError(f"the workload has no request to the base {base!r}; its bases are {names}")
        return self.only(wanted)

    def on_engine(self, engine: int, engines: int) -> Arrivals:
        """Return the share of one of `engines` equal engines: a source uses as few engines as its part allows."""
        if engines == 1:
            return self
        sources = np.random.default_rng(0).permutation(len(self.sources))[self.source]
        counts = np.bincount(sources, minlength=len(self.sources))
        before = np.cumsum(counts) - counts
        order = np.argsort(sources, kind="stable")
        turn = np.empty(len(self), dtype=np.int64)
        turn[order] = np.arange(len(self)) - before[sources[order]]
        # A source covers an interval as long as its part; its requests step through the interval by the golden ratio.
        place = before[sources] + counts[sources] * (turn * 0.6180339887498949 % 1.0)
        return self.only(place * engines // len(self) == engine)

    def requests(self) -> Iterator[tuple[float, TrafficSource, int, Request]]:
        """Yield (arrival, source, tokens it will generate, request). Prompts of one source share its system prompt and
        nothing else.
        """
        columns = (self.source, self.at, self.prompt_tokens, self.output_tokens, self.max_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, (index, at, prompt, output, most) in enumerate(rows):
            source = self.sources[index]
            tokens = _prompt(number, prompt, index, source.system_tokens)
            yield at, source, output, _request(number, source, tokens, most)

    def follow_up(self, number: int, row: int, stage: Stage) -> Request:
        """Return a stage of the conversation that a row began, as the request with this number. Its prompt begins with
        the prompts and answers of all earlier stages of the base.
        """
        index = int(self.source[row])
        length = stage.prompt_tokens - len(stage.invocation)
        context = _prompt(row, length, index, self.sources[index].system_tokens)
        return _request(number, stage.source, [*context, *stage.invocation], stage.max_tokens)


def _request(number: int, source: TrafficSource, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        id=str(number),
        tenant=source.tenant,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        adapter=source.adapter,
        service_class=source.service_class,
        weight=source.weight,
        deadline_ms=None if source.deadline_s is None else round(source.deadline_s * 1000),
    )


def _prompt(number: int, length: int, source: int, shared: int) -> list[int]:
    """Return a prompt whose first `shared` tokens are those of its source."""
    return [-1 - source] * shared + [number] + [0] * (length - shared - 1)


def draw_arrivals(clients: Iterable[Client], duration_s: float, seed: int) -> Arrivals:
    """Draw the requests of `duration_s` seconds. Each client has a separate generator, so an additional client changes
    no other client.

    Raises ScenarioError if no request arrives.
    """
    parts = [_draw(client, duration_s, np.random.default_rng([seed, index])) for index, client in enumerate(clients)]
    sources: list[TrafficSource] = []
    offsets = []
    for part in parts:
        offsets.append(len(sources))
        sources += part.sources
    joined = Arrivals(
        sources,
        np.concatenate([part.source + offset for part, offset in zip(parts, offsets, strict=True)]),
        np.concatenate([part.at for part in parts]),
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        np.concatenate([part.max_tokens for part in parts]),
        _joined_conversations(parts),
    )
    if not len(joined):
        raise ScenarioError("no request arrives: raise duration_s or a client's rate")
    return joined.only(np.argsort(joined.at, kind="stable"))


def _joined_conversations(parts: Sequence[Arrivals]) -> np.ndarray | None:
    if all(part.conversations is None for part in parts):
        return None
    columns = [np.full(len(part), None) if part.conversations is None else part.conversations for part in parts]
    return np.concatenate(columns)


def _draw(client: Client, duration_s: float, rng: np.random.Generator) -> Arrivals:
    if client.conversation is not None:
        return _draw_conversations(client, client.conversation, duration_s, rng)
    at = _times(client, duration_s, rng)
    sources = _sources(client, _generations(client, duration_s))
    try:
        source = choose(rng, len(at), client.popularity, client.adapters or len(sources))
    except ValueError as error:
        raise ScenarioError(f"client {client.tenant!r}: {error}") from None
    if client.lifetime_s is not None:
        source = _alive(source, at, client, rng)
    prompts = client.prompt_tokens.draw(rng, len(at))
    if client.system_tokens is not None:
        prompts = prompts + np.array([one.system_tokens for one in sources])[source]
    outputs = client.output_tokens.draw(rng, len(at))
    most = outputs if client.max_tokens is None else np.full(len(at), client.max_tokens)
    return Arrivals(sources, source, at, prompts, np.minimum(outputs, most), most)


def _draw_conversations(client: Client, conversation: Conversation, duration_s: float, rng: Rng) -> Arrivals:
    """Draw the first requests, which go to the base, and the later stages of each."""
    alone = msgspec.structs.replace(client, adapters=0, conversation=None)
    first = _draw(alone, duration_s, rng)
    invocation = (INVOCATION,) * conversation.invocation_tokens
    evaluators = [
        [
            replace(
                caller,
                adapter=AdapterRef(f"{client.tenant}/{number}", ""),
                rank=client.ranks[number % len(client.ranks)],
                invocation=invocation if conversation.activated else (),
            )
            for number in range(client.adapters)
        ]
        for caller in first.sources
    ]
    count, later = len(first), conversation.turns - 1
    added = conversation.turn_tokens.draw(rng, count * later).reshape(count, later)
    answers = client.output_tokens.draw(rng, count * later).reshape(count, later)
    most = answers if client.max_tokens is None else np.full(answers.shape, client.max_tokens)
    turns = np.stack([added, np.minimum(answers, most), most], axis=2)
    judged = conversation.evaluation_tokens.draw(rng, count * conversation.turns * client.adapters)
    judged = judged.reshape(count, conversation.turns, client.adapters)
    conversations = np.empty(count, dtype=object)
    for row, index in enumerate(first.source.tolist()):
        context = int(first.prompt_tokens[row] + first.output_tokens[row])
        asked = Evaluators(evaluators[index], invocation, judged[row].tolist())
        conversations[row] = tuple(_stages(context, first.sources[index], turns[row].tolist(), asked))
    sources = [*first.sources, *(one for group in evaluators for one in group)]
    return replace(first, sources=sources, conversations=conversations)


class Evaluators(NamedTuple):
    """The adapters of a conversation."""

    sources: Sequence[TrafficSource]
    invocation: tuple[int, ...]
    """Tokens at the end of an evaluation's prompt."""
    output_tokens: Sequence[Sequence[int]]
    """Tokens of each adapter's answer, by turn."""


def _stages(
    context: int, caller: TrafficSource, turns: Sequence[Sequence[int]], evaluators: Evaluators
) -> Iterator[Stage]:
    """Yield the stages after the base's first answer, with which `context` tokens end.

    `turns` has the new tokens, the answer's tokens and their maximum, of each turn after the first.
    """
    invocation = evaluators.invocation
    for turn, outputs in enumerate(evaluators.output_tokens):
        if turn:
            added, output, most = turns[turn - 1]
            context += added
            yield Stage("later turn", caller, context, output, most)
            context += output
        for source, tokens in zip(evaluators.sources, outputs, strict=True):
            yield Stage("evaluation", source, context + len(invocation), tokens, tokens, invocation)
        context += sum(outputs)


def _times(client: Client, duration: float, rng: np.random.Generator) -> np.ndarray:
    """Draw all arrivals before the end at once, with a margin."""
    active = duration - client.start_s
    if active <= 0:
        return np.empty(0)
    expected = client.rate * active
    count = client.requests or int(expected + 6 * (1 + client.cv) * expected**0.5 + 16)
    at = arrival_times(rng, count, client.rate, client.cv)
    if client.on_s is not None:
        at = with_pauses(at, client.on_s, client.off_s)
    at = at + client.start_s
    return at[at < duration]


def _generations(client: Client, duration: float) -> int:
    """Return how many adapters have the same popularity one after the other."""
    return 1 if client.lifetime_s is None else int(duration / client.lifetime_s) + 2


def _alive(place: np.ndarray, at: np.ndarray, client: Client, rng: Rng) -> np.ndarray:
    """Return the adapter that has each place of the popularity at the times `at`, int64 like `place`."""
    assert client.lifetime_s is not None
    phases = rng.random(max(1, client.adapters))
    generations = (at / client.lifetime_s + phases[place]).astype(np.int64)
    return place + generations * client.adapters


def _sources(client: Client, generations: int) -> list[TrafficSource]:
    names = [client.tenant] if client.tenants == 1 else [f"{client.tenant}-{i}" for i in range(client.tenants)]
    common = (client.service_class, client.weight, client.deadline_s, client.preload)
    count = client.adapters * generations or len(names)
    lengths = client.system_tokens.draw(np.random.default_rng(count), count).tolist() if client.system_tokens else None
    systems = lengths or [0] * count
    if not client.adapters:
        named = zip(names, systems, strict=True)
        return [TrafficSource(name, None, 0, *common, tokens, client.base) for name, tokens in named]
    refs = [AdapterRef(f"{client.tenant}/{i}", "") for i in range(count)]
    return [
        TrafficSource(names[i % len(names)], ref, client.ranks[i % len(client.ranks)], *common, systems[i], client.base)
        for i, ref in enumerate(refs)
    ]


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a log: a JSON object, or a CSV row under these names. Other fields of a line are ignored."""

    arrival_s: Annotated[float, Meta(ge=0)]
    prompt_tokens: Count
    output_tokens: Count
    tenant: str = "tenant"
    adapter: str = ""
    """Name of the adapter; empty: the base model."""
    rank: Count = 16
    base: str = ""
    """Name of the base; empty: the only one."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: Annotated[float, Meta(gt=0)] = 1.0
    max_tokens: Count | None = None
    """Limit of the request; None: not logged, and the number of generated tokens is taken."""


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A description of traffic: the clients of a scenario, without a device."""

    description: str = ""
    duration_s: Annotated[float, Meta(gt=0)]
    seed: int = 0
    clients: Annotated[tuple[Client, ...], Meta(min_length=1)]


def read_workload(path: Path) -> Arrivals:
    """Read requests from a .toml description (`duration_s` and `[[clients]]`) or a .jsonl or .csv log.

    Raises ScenarioError, which names the file, the line and the field.
    """
    if path.suffix != ".toml":
        return arrivals_of_log(read_log(path))
    try:
        traffic = msgspec.convert(tomllib.loads(path.read_text()), Traffic)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ScenarioError(f"workload {path}: {error}") from None
    for number, client in enumerate(traffic.clients):
        if client.conversation is not None:
            raise ScenarioError(
                f"workload {path}: clients.{number}.conversation is for scenarios alone; run `loramux simulate {path}`"
            )
    return draw_arrivals(traffic.clients, traffic.duration_s, traffic.seed)


def read_log(path: Path) -> list[LoggedRequest]:
    """Read the requests of a .jsonl or .csv log. Raises ScenarioError, as `read_workload` does."""
    try:
        match path.suffix:
            case ".jsonl":
                return _lines(path, _json_rows(path), strict=True)
            case ".csv":
                return _lines(path, _csv_rows(path), strict=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"workload {path}: {error}") from None
    raise ScenarioError(f"workload {path} is none of .toml (a description), .jsonl and .csv (a log of requests)")


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ScenarioError(f"workload {path}, line {number}: {error}") from None


def _csv_rows(path: Path) -> Iterator[Any]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            yield {name: value for name, value in row.items() if value}


def _lines(path: Path, rows: Iterator[Any], *, strict: bool) -> list[LoggedRequest]:
    requests = []
    for number, row in enumerate(rows, start=1):
        try:
            requests.append(msgspec.convert(row, LoggedRequest, strict=strict))
        except msgspec.ValidationError as error:
            raise ScenarioError(f"workload {path}, request {number}: {error}") from None
    if not requests:
        raise ScenarioError(f"workload {path} has no requests")
    return requests


def arrivals_of_log(requests: Sequence[LoggedRequest]) -> Arrivals:
    """Return the requests of a log as arrivals; the first arrives at 0."""
    numbers: dict[TrafficSource, int] = {}
    first = min(request.arrival_s for request in requests)
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    columns = [
        (
            numbers.setdefault(_source(request), len(numbers)),
            request.prompt_tokens,
            request.output_tokens,
            max(request.output_tokens, request.max_tokens or 0),
        )
        for request in ordered
    ]
    source, prompts, outputs, most = np.array(columns, dtype=np.int64).T
    at = np.array([request.arrival_s - first for request in ordered])
    return Arrivals(list(numbers), source, at, prompts, outputs, most)


def _source(request: LoggedRequest) -> TrafficSource:
    adapter = AdapterRef(f"{request.tenant}/{request.adapter}", "") if request.adapter else None
    common = (request.service_class, request.weight, None, False)
    return TrafficSource(request.tenant, adapter, request.rank, *common, base=request.base)
