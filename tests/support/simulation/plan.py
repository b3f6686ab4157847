"""Choices of one seed: the server's size, the tenants' requests and their times, and the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from loramux.data.entities import ServiceTier

TENANTS = 3
ADAPTERS = 6
CALM, ROUGH = "calm", "rough"


@dataclass(frozen=True)
class Call:
    """One API request of the workload."""

    at: float
    """Seconds of virtual time."""
    tenant: int
    adapter: int | None
    prompt: list[int] | str
    max_tokens: int
    n: int = 1
    prompts: int = 1
    deadline_ms: int | None = None
    stop: tuple[str, ...] = ()
    leaves_after: int | None = None
    """Deltas after which the client goes away."""
    reads_every: float = 0.0
    """Seconds between two reads of a slow client."""
    key: str | None = None
    """An idempotency key."""
    service_tier: ServiceTier = "default"
    is_streamed: bool = True
    pooling: Literal["last", "mean"] | None = None
    """The prompts become vectors, and no answer is generated."""


@dataclass(frozen=True)
class UploadCall:
    """One upload of the workload, and what its client does with the adapter afterwards."""

    at: float
    tenant: int
    name: str
    content: str
    """The weights; those that begin with `bad` do not pass the checks."""
    promote: bool = True
    at_once: bool = True
    """Through the one call that waits for the end; else in parts through a session that is polled."""
    parts: int = 1
    leaves: bool = False
    """The client goes away before the upload is complete."""
    asks: bool = True
    """Sends a request to the new revision."""
    deletes: bool = False
    """Deletes the adapter at the end."""


@dataclass(frozen=True)
class Plan:
    """Everything that differs between two seeds."""

    seed: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pages: int
    block_size: int
    runs_ahead: bool
    prefix_cache: bool
    swap_pages: int
    max_loading: int
    adapter_pages: tuple[int, ...]
    invocations: tuple[tuple[int, ...] | None, ...]
    step_seconds: float
    load_seconds: tuple[float, float]
    """Shortest and longest."""
    load_failures: float
    """Share of the loads."""
    load_hangs: float
    """Share of the loads and inspections that never end."""
    database_seconds: float
    """Most seconds of one statement while the database is healthy."""
    database_outages: tuple[tuple[float, float], ...]
    """From, to: every statement fails."""
    database_stalls: tuple[tuple[float, float], ...]
    """From, to: statements wait for the end."""
    clock_jumps: tuple[tuple[float, float], ...]
    """At, by how many seconds the wall clock jumps."""
    num_engines: int
    engine_deaths: tuple[tuple[float, int], ...]
    """At, and the number of the engine whose process dies."""
    engine_restarts: tuple[tuple[float, int, float], ...]
    """At, the number of the engine that an operator restarts, and the seconds that its requests have to end."""
    start_seconds: float
    """Time to load the model."""
    start_failures: float
    """Share of the restarts that fail."""
    drains_at: float | None
    cancels_unread: bool
    max_draft_tokens: int
    """0: no speculative decoding."""
    max_service_lead: float
    calls: tuple[Call, ...] = ()
    uploads: tuple[UploadCall, ...] = ()
    """Only in a simulation of the whole platform, and so the next two."""
    storage_outages: tuple[tuple[float, float], ...] = ()
    validator_dies: float = 0.0
    """Share of the checks."""

    @property
    def faults(self) -> bool:
        """True if the platform may fail a request."""
        return bool(self.database_outages or self.drains_at is not None or len(self.engine_deaths) > 1)


def make_plan(seed: int) -> Plan:
    """The plan of `seed`; small numbers are likely, because that is where servers hang."""
    rng = random.Random(seed)
    rough = rng.random() < 0.5
    pages = rng.choice([4, 6, 8, 12, 16, 24, 48])
    burst = rng.random() < 0.6
    shape = rng.choice(["few", "few", "crowd", "adapters", "choices"])
    tiers = random.Random(f"service tiers of {seed}")  # a separate generator: other choices of a seed stay as they were
    calls = tuple(
        replace(call, service_tier=tiers.choice(["default", "default", "flex", "batch"]))
        for call in _calls(rng, shape, burst)
    )
    plan = Plan(
        seed=seed,
        max_num_seqs=rng.choice([1, 1, 2, 3, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 32, 64]),
        pages=pages,
        block_size=rng.choice([4, 8, 16]),
        runs_ahead=rng.random() < 0.3,
        prefix_cache=rng.random() < 0.6,
        swap_pages=rng.choice([0, 0, 4, 16]),
        max_loading=rng.choice([1, 2, 4]),
        adapter_pages=tuple(rng.randint(1, max(1, pages * 3 // 4)) for _ in range(ADAPTERS)),
        invocations=tuple((104, 105) if rng.random() < 0.1 else None for _ in range(ADAPTERS)),
        step_seconds=rng.choice([0.001, 0.01, 0.05]),
        load_seconds=rng.choice([(0.001, 0.01), (0.02, 2.0), (0.5, 5.0)]),
        load_failures=rng.choice([0.0, 0.0, 0.2]) if rough else 0.0,
        load_hangs=rng.choice([0.0, 0.0, 0.2]) if rough else 0.0,
        database_seconds=rng.choice([0.0001, 0.001, 0.02]),
        database_outages=_spans(rng, 0.15, 6.0) if rough else (),
        database_stalls=_spans(rng, 0.3, 3.0) if rough else (),
        clock_jumps=((rng.uniform(0, 5), rng.choice([-7200.0, -1.0, 3600.0, 90000.0])),) if rng.random() < 0.2 else (),
        **_fleet(rng, random.Random(f"fleet {seed}"), rough),
        drains_at=rng.uniform(0, 5) if rng.random() < 0.1 else None,
        cancels_unread=rng.random() < 0.5,
        max_draft_tokens=random.Random(~seed).choice([0, 1, 3, 8]),
        max_service_lead=8192.0,
        calls=calls,
        uploads=tuple(_uploads(rng)),
        storage_outages=_spans(rng, 0.3, 8.0, earliest=1.0) if rough else (),
        validator_dies=0.3 if rough and rng.random() < 0.2 else 0.0,
    )
    own = random.Random(f"storage {seed}")
    return _pool_some(_crowd_storage(plan, own) if own.random() < 0.3 else plan)


def _pool_some(plan: Plan) -> Plan:
    """In about a third of the seeds, turn some calls into calls for embeddings. A separate generator chooses them."""
    rng = random.Random(f"pooling {plan.seed}")
    if rng.random() > 0.35:
        return plan
    fields: dict[str, Any] = {"n": 1, "stop": (), "is_streamed": False}
    calls = [
        replace(call, pooling=rng.choice(["last", "mean"]), **fields) if rng.random() < 0.5 else call
        for call in plan.calls
    ]
    return replace(plan, calls=tuple(calls))


def _crowd_storage(plan: Plan, rng: random.Random) -> Plan:
    """Adapters that do not fit side by side, slow loads, and service leads that are reached; one engine that lives."""
    pages = rng.choice([8, 16, 48])
    sizes = rng.choice([(1, 1), (pages // 3, pages * 5 // 8)])
    calls = [Call(0.0, tenant=0, adapter=None, prompt=[97, 98], max_tokens=30, n=rng.choice([1, 2])) for _ in range(2)]
    for number in range(rng.randint(3, 8)):
        at = rng.choice([0.0, rng.uniform(0.0, 3.0)])
        adapter = rng.randrange(ADAPTERS)
        calls.append(Call(at, number % TENANTS, adapter, [rng.randint(97, 110)] * 3, rng.choice([1, 5, 12])))
    return replace(
        plan,
        pages=pages,
        block_size=8,
        max_num_seqs=8,
        num_engines=1,
        engine_deaths=(),
        engine_restarts=(),
        drains_at=None,
        max_loading=rng.choice([1, 2]),
        load_seconds=rng.choice([(0.5, 5.0), (0.02, 2.0)]),
        adapter_pages=tuple(rng.randint(*sizes) for _ in range(ADAPTERS)),
        max_service_lead=rng.choice([4.0, 16.0, 8192.0]),
        calls=tuple(calls),
    )


def _fleet(rng: random.Random, own: random.Random, rough: bool) -> dict[str, Any]:
    """Return the engines and their deaths. All but the death of a single engine are drawn by a separate generator."""
    deaths = [(rng.uniform(0, 5), 0)] if rough and rng.random() < 0.15 else []
    count = own.choice([1, 1, 2, 3, 4])
    if count > 1 and own.random() < 0.6:
        deaths = [(_moment(own), own.randrange(count)) for _ in range(own.choice([1, 1, 2, 5]))]
    restarts = []
    if own.random() < 0.3:
        restarts = [(_moment(own), own.randrange(count), own.choice([0.0, 0.0, 0.5, 30.0])) for _ in range(2)]
    return {
        "num_engines": count,
        "engine_deaths": tuple(deaths),
        "engine_restarts": tuple(restarts),
        "start_seconds": own.choice([0.01, 1.0, 10.0]),
        "start_failures": own.choice([0.0, 0.0, 0.3]),
    }


def _moment(rng: random.Random) -> float:
    """A time at which most requests run, or any."""
    return rng.choice([rng.uniform(0, 0.3), rng.uniform(0, 5)])


def _calls(rng: random.Random, shape: str, burst: bool) -> list[Call]:
    count = {"few": rng.randint(1, 3), "crowd": rng.randint(5, 14), "adapters": rng.randint(4, 10), "choices": 2}[shape]
    deadlines = rng.random() < 0.3
    calls = []
    for number in range(count):
        adapter = rng.randrange(ADAPTERS) if rng.random() < (0.95 if shape == "adapters" else 0.4) else None
        at = 0.0 if burst else rng.uniform(0, 4)
        words = rng.choice([1, 3, 8, 20, 40])
        head = [rng.choice([65, 66])] * rng.choice([0, 0, 8, 16])
        token_ids = head + [rng.randint(97, 110) for _ in range(words)]
        prompt: list[int] | str = bytes(token_ids).decode() if rng.random() < 0.2 else token_ids
        many = shape == "choices"
        calls.append(
            Call(
                at=at,
                tenant=rng.randrange(TENANTS),
                adapter=adapter,
                prompt=prompt,
                max_tokens=1 if many and rng.random() < 0.5 else rng.choice([1, 2, 5, 12, 30]),
                n=rng.choice([8, 20]) if many else rng.choice([1, 1, 1, 2, 4]),
                prompts=rng.choice([1, 6]) if many else 1,
                deadline_ms=rng.choice([50, 200, 1000, 5000]) if deadlines and rng.random() < 0.7 else None,
                stop=(rng.choice(["a", "ab", "m", "zq"]),) if rng.random() < 0.2 else (),
                leaves_after=rng.randint(0, 6) if rng.random() < 0.2 else None,
                reads_every=rng.choice([0.05, 0.5]) if rng.random() < 0.15 else 0.0,
                key=f"key-{number // 2}" if rng.random() < 0.15 else None,
                is_streamed=rng.random() < 0.6,
            )
        )
    return calls


def _uploads(rng: random.Random) -> list[UploadCall]:
    return [
        UploadCall(
            at=rng.choice([0.0, 0.0, rng.uniform(0, 4)]),
            tenant=rng.randrange(TENANTS),
            name=f"u{rng.randrange(2)}",
            content=rng.choice(["bad", "fine", "fine", "fine"]) + str(number),
            promote=rng.random() < 0.8,
            at_once=rng.random() < 0.5,
            parts=rng.randint(1, 3),
            leaves=rng.random() < 0.15,
            asks=rng.random() < 0.7,
            deletes=rng.random() < 0.2,
        )
        for number in range(rng.randint(1, 6))
    ]


def _spans(rng: random.Random, chance: float, longest: float, earliest: float = 0.0) -> tuple[tuple[float, float], ...]:
    if rng.random() > chance:
        return ()
    start = earliest + rng.uniform(0, 4)
    return ((start, start + rng.uniform(0.05, longest)),)
