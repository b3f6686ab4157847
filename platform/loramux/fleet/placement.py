"""The homes of adapters and of prefixes: the engines that keep them.

A *key* is a revision, or the beginning of prompts of the base. A step of an engine reads the weights, the pages of its
distinct adapters and the KV of its rows. So a key costs an engine, in seconds of each step,

    page_s * (min(1, rows) * pages of the adapter + rows * pages of a row) + prompt tokens per second * time of a token

with the engine's own measured times. An adapter of rank 64 costs eight times the pages of one of rank 8.

1. **First home.** Of the first `CHOICES` engines of the key's rendezvous order (Thaler and Ravishankar, 1998), the one
   whose steps are predicted to have the least *work* with the key: their time without that of the base's weights.
   Engines that hold the adapter already come first, so that all servers agree. Engines whose pool is full of others'
   adapters come last.
2. **Copies.** The key's number of homes follows its load: its requests in flight, divided by half of the number that an
   engine should hold. The load rises at once and falls with a half-life, so the number does not oscillate.
3. **Moves.** Once a second, keys move from the engine with the most work in its steps to the one with the least, if the
   first has more than `tolerance` times the mean and a move pays for the load and the prefill that it causes. A move
   changes where new requests go; running requests stay. At most `moves_per_minute` keys move, and a key stays
   `settle_s` where it was moved to.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from loramux.fleet.view import EngineLoad, SentRequest

MAX_KEYS = 16_384
"""Maximum number of keys whose homes and load are remembered."""
CHOICES = 4
"""Engines that are compared for a key's first home."""
HOLDING_WORTH = 3.0
"""Ratio of work above which a key is placed away from an engine that holds it."""
MEAN_SECONDS = 30.0
"""Seconds after which a request counts half in a key's mean load."""
PAYBACK = 4.0
"""Engine time that a move must save in `settle_s`, in multiples of the time of a load and of a prompt's prefill."""
MOVES_AT_ONCE = 4
"""Maximum number of keys that move in one look."""
BALANCE_SECONDS = 1.0
"""Seconds between two looks for an engine that should give keys away."""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Limits and times of the router."""

    balance: float = 1.5
    """Maximum number of requests of an engine, in multiples of the mean."""
    light_load: int = 8
    """Number of requests that an engine may always hold. Below this number another copy of an adapter saves no time."""
    home_share: float = 0.5
    """Part of an engine's bound that one adapter may fill before it gets another engine."""
    half_life_s: float = 10.0
    """Seconds after which the load of an adapter without requests counts half."""
    patience: float = 2.0
    """Factor by which the first token must be earlier on another engine for a request to leave its adapter's homes."""
    tolerance: float = 1.2
    """Ratio of the most predicted work of an engine's step to the mean, above which keys move."""
    moves_per_minute: int = 60
    """Maximum number of keys that one server moves in a minute."""
    settle_s: float = 60.0
    """Seconds for which a key stays after a move. A key without requests for this time is placed anew."""


@dataclass(eq=False, slots=True)
class Demand:
    """Requests of a key in flight, their peak, which fades, and the key's homes."""

    in_flight: int = 0
    peak: float = 0.0
    changed_at: float = 0.0
    _rows: float = 0.0
    _tokens_per_s: float = 0.0
    homes: list[str] = field(default_factory=list)
    pages: int = 0
    """Pages of the adapter; 0: unknown, or the base."""
    prompt_tokens: int = 0
    """Tokens of the last prompt, which are computed again where the key moves to."""
    kv_pages: int = 0
    """Pages of KV of the beginning that the key names; 0 for adapters."""
    moved_at: float = -math.inf

    def level(self, now: float, half_life: float) -> float:
        """Return the requests in flight, or the faded peak if it is larger."""
        if now <= self.changed_at or self.peak <= self.in_flight:
            return max(self.in_flight, self.peak)
        return max(self.in_flight, self.peak * 0.5 ** ((now - self.changed_at) / half_life))

    def means(self, now: float) -> tuple[float, float]:
        """Return the mean number of requests in flight, and the prompt tokens to compute per second."""
        if now <= self.changed_at:
            return self._rows, self._tokens_per_s
        keep = 0.5 ** ((now - self.changed_at) / MEAN_SECONDS)
        return keep * self._rows + (1.0 - keep) * self.in_flight, keep * self._tokens_per_s

    def change(self, requests: int, now: float, half_life: float, tokens: int = 0) -> None:
        """Count requests that came or ended, with the prompt tokens that must be computed for them."""
        self._rows, self._tokens_per_s = self.means(now)
        self._tokens_per_s += tokens * math.log(2.0) / MEAN_SECONDS
        self.in_flight += requests
        self.peak = self.level(now, half_life)
        self.changed_at = max(now, self.changed_at)


class Placement:
    """Homes and load of each key, as one server sees them. Only `note_sent`, `note_ended` and `rebalance` change it."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._demand: OrderedDict[str, Demand] = OrderedDict()
        self._keys_of: dict[str, dict[str, None]] = {}
        """Keys by their homes."""
        self._pages_of: dict[str, int] = {}
        """Pages of the adapters whose homes an engine is."""
        self._known_pages = 0
        """Pages of the last adapter whose size was seen: the guess for an unknown one."""
        self._balance_at = -math.inf
        self._moves_left = float(policy.moves_per_minute)
        self.num_moves = 0
        """Keys that were moved so far."""

    # questions

    def copies(self, key: str, home_load: float, others: float, most: int, now: float) -> int:
        """Return the number of homes that the key's load needs, at most `most`.

        `home_load` is the number of requests of one key that an engine may hold; `others` the requests of other
        servers, divided by this server's.
        """
        demand = self._demand.get(key)
        if demand is None:
            return 1
        # Other servers are assumed to send similar traffic. A single request gives no information about other servers.
        level = demand.level(now, self._policy.half_life_s)
        level += max(0.0, level - 1.0) * others
        return max(1, min(most, math.ceil(level / home_load)))

    def known_homes(self, key: str, engines: Mapping[str, EngineLoad], now: float) -> list[str]:
        """Return the homes of `key` so far that are among `engines`; none if it had no request for long."""
        demand = self._demand.get(key)
        if demand is None or self._is_stale(demand, now):
            return []
        return [engine for engine in demand.homes if engine in engines]

    def homes(
        self, key: str, known: list[str], copies: int, engines: Mapping[str, EngineLoad], holders: list[str], now: float
    ) -> list[str]:
        """Return `copies` engines that should get requests of `key`: those that are `known`, and further ones.

        `holders` are the engines that have the adapter or the beginning of the prompt now.
        """
        order, held = engine_order(key, tuple(engines)), set(holders)
        if copies == 1:
            order = (*order[:CHOICES], *[engine for engine in order[CHOICES:] if engine in held])
        elif known:
            order = tuple([engine for engine in order if engine not in known])
        demand = self._demand.get(key) or Demand()
        rows, tokens_per_s = demand.means(now)
        means = max(1.0, rows), tokens_per_s
        scores = {engine: self._score(demand, means, engines[engine], engine in held) for engine in order}
        return [*known, *sorted(order, key=scores.__getitem__)[: copies - len(known)]]

    def _is_stale(self, demand: Demand, now: float) -> bool:
        return not demand.in_flight and now - demand.changed_at > self._policy.settle_s

    def _score(
        self, demand: Demand, means: tuple[float, float], engine: EngineLoad, is_held: bool
    ) -> tuple[bool, float]:
        """Return the order of engines for a key: room in the pool first, then the least predicted work.

        An engine that holds the key already may have more work: it need not load or compute anything.
        """
        seconds = engine.work_s + added_s(demand, means, engine)
        return not (is_held or self._fits(demand, engine)), seconds if is_held else HOLDING_WORTH * seconds

    def _fits(self, demand: Demand, engine: EngineLoad) -> bool:
        """Return whether the pool holds all adapters whose home the engine is, next to the KV of running requests."""
        view = engine.view
        held = demand.kv_pages or demand.pages or self._known_pages
        return self._pages_of.get(view.engine, 0) + held + view.running * view.row_pages <= max(1, view.pages)

    # events

    def note_sent(self, sent: SentRequest, homes: list[str], engines: Mapping[str, EngineLoad], now: float) -> None:
        """Count a request of a key, and keep `homes`, which `homes` has returned. Class batch raises no load, so it
        gets no copies.
        """
        key, request = sent.key, sent.request
        demand = self._demand.get(key)
        if demand is None:
            kv_pages = 0 if request.identity.digest else request.prompt_tokens // request.block_size
            demand = self._demand[key] = Demand(changed_at=now, kv_pages=kv_pages)
            if len(self._demand) > MAX_KEYS:
                self._forget_one()
        self._demand.move_to_end(key)
        demand.prompt_tokens = request.prompt_tokens
        pages = engines[sent.engine].view.resident.get(key, 0) if sent.engine in engines else 0
        if pages and pages != demand.pages:
            for home in demand.homes:
                self._pages_of[home] += pages - demand.pages
            demand.pages = self._known_pages = pages
        self._settle(key, demand, homes, engines, now)
        demand.change(0 if request.is_background else 1, now, self._policy.half_life_s, sent.tokens)

    def note_ended(self, sent: SentRequest, now: float) -> None:
        """Count the end of a request."""
        if (demand := self._demand.get(sent.key)) and not sent.request.is_background:
            demand.change(-1, now, self._policy.half_life_s)

    def forget(self, engine: str) -> None:
        """Forget that `engine`, which is lost, is a home."""
        for key in self._keys_of.pop(engine, ()):
            self._demand[key].homes.remove(engine)
        self._pages_of.pop(engine, None)

    def rebalance(self, engines: Mapping[str, EngineLoad], now: float) -> None:
        """Move keys from the engine with the most predicted work to the one with the least, at most once a second."""
        if now < self._balance_at:
            return
        policy = self._policy
        self._moves_left += policy.moves_per_minute * min(60.0, now - self._balance_at + BALANCE_SECONDS) / 60.0
        self._moves_left = min(self._moves_left, float(policy.moves_per_minute))
        self._balance_at = now + BALANCE_SECONDS
        measured = [engine for engine in engines.values() if engine.step_s]
        if len(measured) < 2:
            return
        for _ in range(MOVES_AT_ONCE):
            mean = sum(engine.work_s for engine in measured) / len(measured)
            most = max(measured, key=lambda engine: engine.work_s)
            if self._moves_left < 1.0 or most.work_s <= policy.tolerance * mean:
                return
            least = min(measured, key=lambda engine: engine.work_s)
            if not self._move(most, least, now):
                return

    def _move(self, source: EngineLoad, target: EngineLoad, now: float) -> bool:
        """Move the key that makes the work of both most alike; return False if none does."""
        half = (source.work_s - target.work_s) / 2.0
        best, seconds = None, 0.0
        for key in self._keys_of.get(source.view.engine, ()):
            demand = self._demand[key]
            if now - demand.moved_at < self._policy.settle_s or target.view.engine in demand.homes:
                continue
            added = added_s(demand, demand.means(now), source)
            if seconds < added <= half and self._fits(demand, target) and self._pays(demand, added, source):
                best, seconds = key, added
        if best is None:
            return False
        demand = self._demand[best]
        homes = [target.view.engine if home == source.view.engine else home for home in demand.homes]
        self._replace(best, demand, homes)
        demand.moved_at = now
        source.placed_s -= seconds
        target.placed_s += seconds
        self._moves_left -= 1.0
        self.num_moves += 1
        return True

    def _pays(self, demand: Demand, added: float, engine: EngineLoad) -> bool:
        """Return whether a move saves more of the engine's time while it lasts than its load and prefill take."""
        view = engine.view
        saved = added * self._policy.settle_s / engine.step_s
        prefill = demand.prompt_tokens / view.prefill_tokens_per_s if view.prefill_tokens_per_s else 0.0
        return saved >= PAYBACK * ((view.load_s if demand.pages else 0.0) + prefill)

    def _settle(
        self, key: str, demand: Demand, homes: list[str], engines: Mapping[str, EngineLoad], now: float
    ) -> None:
        """Make `homes` the homes of the key. New homes get its predicted seconds until their statistics show them."""
        if demand.homes == homes:
            return
        new = [home for home in homes if home not in demand.homes]
        self._replace(key, demand, homes)
        rows, tokens_per_s = demand.means(now)
        for home in new:
            if home in engines:
                engines[home].placed_s += added_s(demand, (max(1.0, rows), tokens_per_s), engines[home])

    def _replace(self, key: str, demand: Demand, homes: Iterable[str]) -> None:
        for home in demand.homes:
            del self._keys_of[home][key]
            self._pages_of[home] -= demand.pages + demand.kv_pages
        demand.homes = list(homes)
        for home in demand.homes:
            self._keys_of.setdefault(home, {})[key] = None
            self._pages_of[home] = self._pages_of.get(home, 0) + demand.pages + demand.kv_pages

    def _forget_one(self) -> None:
        """Forget the key whose last request is oldest, among those with no request in flight."""
        for key, demand in self._demand.items():
            if not demand.in_flight:
                self._replace(key, demand, ())
                del self._demand[key]
                return


def added_s(demand: Demand, means: tuple[float, float], engine: EngineLoad) -> float:
    """Return the seconds that a key adds to each step of `engine`, by the means of its requests and prompt tokens."""
    view, homes = engine.view, max(1, len(demand.homes))
    rows, tokens_per_s = means[0] / homes, means[1] / homes
    seconds = view.page_s * (min(1.0, rows) * demand.pages + rows * view.row_pages)
    rate = view.prefill_tokens_per_s
    return seconds + tokens_per_s * engine.step_s / rate if rate else seconds


def place_pins(
    digests: Iterable[str], engines: Iterable[str], pages: Mapping[str, int], balance: float = 1.25
) -> dict[str, list[str]]:
    """Return the digests that each engine should keep. Each digest is kept by one engine that is early in its order,
    and no engine keeps far more pages than others.

    `pages` are the known sizes; a digest without a size counts as large as the mean of the others.
    """
    wanted, names = set(digests), tuple(engines)
    known = [pages[digest] for digest in wanted if digest in pages]
    mean = sum(known) / len(known) if known else 1.0
    sizes = {digest: pages.get(digest, mean) for digest in wanted}
    most = balance * sum(sizes.values()) / max(1, len(names))
    placed: dict[str, list[str]] = {engine: [] for engine in names}
    held = dict.fromkeys(names, 0.0)
    for digest in sorted(wanted, key=lambda digest: (-sizes[digest], digest)):
        order = engine_order(digest, names)
        fits = (engine for engine in order if held[engine] + sizes[digest] <= most)
        engine = next(fits, min(order, key=held.__getitem__))
        placed[engine].append(digest)
        held[engine] += sizes[digest]
    return placed


@lru_cache(maxsize=16_384)
def engine_order(key: str, engines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the engines in the order of `key`: random, but the same in every process."""
    # Two rounds of splitmix64 over both hashes: as even as a hash of each pair, and 64 engines take 10 microseconds.
    mixed = _draws(engines) ^ np.uint64(draw(key))
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(factor)
    return tuple([engines[index] for index in (mixed ^ (mixed >> np.uint64(31))).argsort().tolist()])


@lru_cache(maxsize=64)
def _draws(engines: tuple[str, ...]) -> NDArray[np.uint64]:
    return np.array([draw(engine) for engine in engines], dtype=np.uint64)


def draw(text: str) -> int:
    """Return a random number that depends only on `text`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
