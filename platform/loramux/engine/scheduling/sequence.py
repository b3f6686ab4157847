"""A request's mutable run: its tokens so far, how much of them is in the KV cache, and its place in the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.engine.memory.pages import SequenceKv
from loramux.engine.messages import EngineFault
from loramux.engine.request import Request
from loramux.engine.scheduling.drafts import Drafter
from loramux.engine.scheduling.estimates import QueuedWork
from loramux.engine.scheduling.fairness import Flow

OUTRUNS = 0.5
"""Drafted tokens accepted lately, by `Acceptance`, from which a sequence is expected to be faster than others."""

BASE_SLOT = -1
"""The slot of a sequence that no adapter serves."""


@dataclass(eq=False, slots=True)
class RequestGroup:
    """The choices of one API request. They share one deadline, which is decided before the first of them begins."""

    id: str
    is_shared: bool = False
    """True if it may have more than one member."""
    start_by: float | None = None
    """The time by which the first of them must have begun, by the scheduler's clock; None without a deadline."""
    deadline_ms: int | None = None
    is_started: bool = False
    refusal: EngineFault | None = None
    """The fault that refuses all of them; None where they are not refused."""
    waiting: set[Sequence] = field(default_factory=set)
    """Sequences that were accepted and have not ended."""


class Sequence(SequenceKv):
    """One running or waiting request. Identity, not equality: two sequences are never the same."""

    __slots__ = (
        "arrival",
        "began_at",
        "digest",
        "drafter",
        "expected_service",
        "flow",
        "group",
        "id",
        "likely_len",
        "load",
        "load_units",
        "max_len",
        "num_loads",
        "num_preemptions",
        "num_scored",
        "predicted_ttft_s",
        "queued",
        "slot",
        "units_at_start",
    )

    def __init__(self, request: Request, arrival: float, flow: Flow | None = None) -> None:
        super().__init__(request)
        self.id = request.id
        self.arrival = arrival
        self.flow = Flow() if flow is None else flow
        """The tenant in a class that its service is charged to."""
        self.group: RequestGroup | None = None
        self.digest = request.adapter.digest if request.adapter else None
        """The revision it runs under; None for the base model."""
        self.max_len = self.likely_len = self.num_prompt_tokens + request.max_output
        """Tokens it may grow to, and tokens it is expected to grow to; memory is planned by the latter."""
        self.slot = BASE_SLOT
        """The bank slot of its adapter while it runs."""
        self.expected_service = 0.0
        """Units it should have taken in all when it ends, as was expected when it was admitted."""
        self.units_at_start = 0
        """`units` when it last began to run."""
        self.queued = QueuedWork()
        """The work that it was counted for when it was queued last."""
        self.num_preemptions = 0
        last = self.num_prompt_tokens - 1
        self.num_scored = 0 if self.needs_whole_prompt and request.pooling is None else last
        """Leading tokens from which the next one's log probability was computed, or is not wanted; the prompt's last
        leads to the answer."""
        self.num_loads = 0
        """Loads of its adapter that were started for it."""
        self.load: tuple[float, float] | None = None
        """Seconds after its arrival from which, and to which, its adapter was loaded while it waited."""
        self.load_units = 0.0
        """Units of those loads that are not charged yet."""
        self.predicted_ttft_s: float | None = None
        """Seconds to its first token, as predicted on arrival; None where it has no deadline."""
        self.drafter: Drafter | None = None
        """Its drafts, once it decodes where drafts are allowed."""
        self.began_at: float | None = None
        """The time at which its first step was planned, in seconds of the scheduler's clock."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def likely_left(self) -> int:
        """Tokens it is expected to generate yet. One that outlives its estimate may go on for half as long again."""
        held = len(self.token_ids)
        left, beyond = self.likely_len - held, (held - self.num_prompt_tokens) // 2
        return left if left >= beyond else max(left, min(self.max_len - held, beyond))

    @property
    def outruns_others(self) -> bool:
        """Does it grow by more than a token a step, because drafts of it are accepted?"""
        return self.drafter is not None and self.drafter.acceptance.accepted >= OUTRUNS

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must go through the model before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_next(self) -> int:
        """The first of them that one model serves, so that one chunk can hold them."""
        start, activation = self.num_computed, self.activation
        end = len(self.token_ids)
        return (end if activation is None or not start < activation < end else activation) - start

    def to_score(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of its tokens [start, end) from which the next one's log probability is to be computed."""
        first = max(start, self.num_scored)
        return first, max(first, min(end, self.num_prompt_tokens - 1))

    @property
    def units(self) -> int:
        """Service that is behind it: a prompt token is one unit, whether computed or found, a generated one two."""
        reached = max(self.num_ever_computed, self.num_computed)
        return min(reached, self.num_prompt_tokens) + 2 * self.num_output_tokens

    @property
    def made_progress(self) -> bool:
        """Has it got further, since it last began to run, than it had been before?"""
        return self.units > self.units_at_start

    def note_load(self, began: float, ended: float) -> None:
        """Note a load of its adapter, by the scheduler's clock, if it ended while the sequence waited."""
        assert self.began_at is not None, "its wait is over"
        if ended > self.arrival:
            self.load = max(0.0, began - self.arrival), min(ended, self.began_at) - self.arrival

    def activate(self, invocation: tuple[int, ...]) -> None:
        """Let the adapter serve from the last occurrence of `invocation` in the prompt on; without one never (as
        PEFT)."""
        prompt, length = self.request.prompt_token_ids, len(invocation)
        starts = range(self.num_prompt_tokens - length, -1, -1)
        found = (start for start in starts if tuple(prompt[start : start + length]) == invocation)
        self.activation = next(found, self.max_len)

    def slot_at(self, position: int) -> int:
        """The slot that serves the token at `position` while it runs."""
        return self.slot if self.activation is None or position >= self.activation else BASE_SLOT

    def fresh_prompt(self, start: int, end: int) -> int:
        """Tokens of [start, end) that are of the prompt, and are computed for the first time."""
        return max(0, min(end, self.num_prompt_tokens) - max(start, self.num_ever_computed))

    def recomputed(self, start: int, end: int) -> int:
        """Tokens of [start, end) that had been computed before, or found, and were lost since."""
        return max(0, min(end, self.num_ever_computed) - start)

    def cost(self, start: int, end: int) -> int:
        """Units that computing the tokens [start, end) is charged.

        A prompt token computed for the first time is one, reaching the last token (so that one is generated) two.
        """
        fresh = self.fresh_prompt(start, end) if start < self.num_prompt_tokens else 0
        return fresh + 2 * (end == len(self.token_ids))

    def take_cost(self, start: int, end: int) -> float:
        """`cost`, and with the first tokens that cost anything the loads of its adapter.

        A load is charged with progress and never by itself: the charge may suspend the tenant, and a tenant that was
        suspended for a load before it got anything for it could lose the adapter, load it again, and so on for ever.
        """
        cost: float = self.cost(start, end)
        if cost and self.load_units:
            cost += self.load_units
            self.load_units = 0.0
        return cost
