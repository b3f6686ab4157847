"""A submitted request of a group of engines: the tokens and the usage that its engines have sent, and their deaths.

A request may cause the death of an engine. A request is a suspect if MAX_DEATHS consecutive engines died while they had
it and before they sent it a token. The first death always counts. A later death counts only if the engine was working
on the request, in a step or with the load of its adapter, because most requests of a busy engine only wait.
`Request.report_start` makes engines report this. Suspects are tried one at a time, so a suspect that gets a token is
cleared. If MAX_TRIALS more engines die during a suspect's trials, the suspect ends with an error. A request that
MAX_LOST consecutive engines lost without a token also ends with an error.
"""

from __future__ import annotations

import asyncio

import msgspec

from loramux.common.units import TokenCounts
from loramux.engine.client import EngineClient, OnEvent
from loramux.engine.messages import EngineCount, Request, TokenEvent
from loramux.fleet.member import FleetEngine
from loramux.fleet.view import RoutingRequest

MAX_DEATHS = 2
"""Number of consecutive engines that die while they work on a request, before its first token from them, after which
the request is a suspect.
"""
MAX_TRIALS = 2
"""Number of engines that die during a suspect's trials, after which the suspect counts as the cause. One death is not
enough, because the engine may be killed for another reason, and while there are suspects one of them is always on
trial.
"""
MAX_LOST = 8
"""Maximum number of consecutive engines that may lose a request before they send it a token, even if they had not begun
with it.
"""


class Choices(dict[str, "Run"]):
    """The choices of one request that have not ended, by their ids."""

    has_started = False
    """True if any choice has a token, of those that have ended too: then no deadline remains."""


class Run:
    """One request, and the tokens that engines have sent for it."""

    __slots__ = (
        "_submitted_at",
        "cached_tokens",
        "choices",
        "count",
        "engine",
        "has_begun",
        "is_cancelled",
        "is_moving",
        "left",
        "num_before",
        "num_deaths",
        "num_lost",
        "on_event",
        "request",
        "routed",
        "timeout",
        "token_ids",
    )

    def __init__(
        self, request: Request, on_event: OnEvent, now: float, choices: Choices, routed: RoutingRequest | None = None
    ) -> None:
        self.request = request
        self.choices = choices
        """This request and the other choices of its group."""
        self.routed = routed
        """The request's properties for the router; None if the group has one engine."""
        self.on_event = on_event
        self.engine: FleetEngine | None = None
        """Engine that has the request; None while the request waits for an engine."""
        self.left: EngineClient | None = None
        """Life of an engine that had the request last, and gave it back. The request goes to another if it can."""
        self.token_ids: list[int] = []
        """Tokens of the answer so far."""
        self.num_deaths = 0
        """Number of consecutive engines that died while they worked on the request, before they sent it a token."""
        self.num_lost = 0
        """Engines in a row that died before they had sent it a token."""
        self.has_begun = False
        """True if the engine is known to work on the request now."""
        self.is_moving = False
        """True if the engine was told to give the request back."""
        self.is_cancelled = False
        """True if the caller has cancelled the request."""
        self.timeout: asyncio.TimerHandle | None = None
        """Timer that ends the request while it waits for an engine."""
        self._submitted_at = now
        self.num_before = 0
        """Tokens of the answer that earlier engines have sent."""
        self.cached_tokens = 0
        """Prompt tokens that the engine of the first token found in its cache."""
        self.count = EngineCount()
        """Usage on earlier engines."""

    def rest(self, now: float) -> Request:
        """Return the remaining part of the request."""
        has_started = self.choices.has_started
        if not (has_started or self.num_lost or round(1000 * (now - self._submitted_at))):
            return self.request
        return msgspec.structs.replace(
            self.request,
            output_token_ids=list(self.token_ids),
            deadline_ms=self.deadline_ms(now),
            group_started=has_started,
            report_start=self.num_lost > 0,
        )

    def deadline_ms(self, now: float) -> int | None:
        """Return the remaining milliseconds to the deadline of the first token; None without a deadline."""
        if self.request.deadline_ms is None:
            return None
        return max(1, self.request.deadline_ms - round(1000 * (now - self._submitted_at)))

    def counted(self, event: TokenEvent) -> TokenEvent:
        """Return the last event with the usage of all engines."""
        if event.count is None or self.count == EngineCount():
            return event
        return msgspec.structs.replace(event, count=self._with(event.count))

    def _with(self, count: EngineCount) -> EngineCount:
        """Return the usage on earlier engines together with an engine's `count`. As long as none of them had sent a
        token, each began the prompt anew, and the prompt counts once: as that of the engine that got furthest."""
        if self.num_before:
            return self.count + count
        return max(count, self.count, key=lambda one: (one.tokens.output, one.tokens.prompt))

    def leave_engine(self, count: EngineCount | None) -> None:
        """Note that the engine has sent the last event. Without a count the engine has died, and its events are counted
        instead.
        """
        num_sent = len(self.token_ids) - self.num_before
        if num_sent:
            self.num_deaths = self.num_lost = 0
        elif count is None:
            self.num_deaths += self.has_begun or not self.num_lost
            self.num_lost += 1
        if count is None and num_sent:
            is_first = self.num_before == 0
            prompt, cached = (len(self.request.prompt_token_ids), self.cached_tokens) if is_first else (0, 0)
            count = EngineCount(tokens=TokenCounts(prompt=prompt, cached=cached, output=num_sent))
        self.count = self._with(count or EngineCount())
        self.num_before = len(self.token_ids)
        self.left = self.engine.client if self.engine is not None else None
        self.engine, self.is_moving, self.has_begun = None, False, False

    @property
    def is_suspect(self) -> bool:
        """True if the request may be the cause of engines' deaths."""
        return self.num_deaths >= MAX_DEATHS

    @property
    def is_cause(self) -> bool:
        """True if too many engines have died under it."""
        return self.num_deaths >= MAX_DEATHS + MAX_TRIALS or self.num_lost >= MAX_LOST
