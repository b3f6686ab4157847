"""One line in the log for each request, and its trace: its ids, its caller, what it used, and how it ended."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, cast

import structlog
from litestar.types import Message, Scope

from loramux.gateway import Generation
from loramux.tenants import Principal
from loramux_api.headers import traceable_id
from loramux_api.tracing import Phase, TraceParent, Tracer

logger = logging.getLogger(__name__)

PROBES = ("/health", "/metrics")
"""Paths that are asked every few seconds: their lines have the level `debug`."""
_traceparent = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_record: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


class RequestRecord:
    """The line of one request. It is written when the response has been sent and the generation is settled.

    A generation ends after its response where the client has left, or where an idempotency key keeps it running.
    """

    def __init__(self, scope: Scope, tracer: Tracer | None) -> None:
        self._scope = scope
        self._tracer = tracer
        self.parent = _parent_of(scope) or (tracer.new_trace() if tracer is not None else None)
        """Its place in a trace; None where the client sent none and the server makes none."""
        self._began = self._ended = time.monotonic()
        self._phases: list[Phase] = []
        self._fields: dict[str, Any] = {"request": traceable_id(scope)}
        self._open = 1
        self._level = logging.INFO

    def open_generation(self) -> None:
        """Wait with the line for a generation, which calls `close_generation` at its end."""
        self._open += 1

    def close_generation(self, generation: Generation) -> None:
        """Add what a generation used, and how it ended."""
        opened, usage = generation.opened, generation.usage
        self._note_phases(generation)
        self._fields |= {
            "kind": opened.id.partition("-")[0],
            "completion": opened.id,
            "base": opened.base_model,
            "revision": opened.adapter_digest,
            "outcome": generation.status,
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.output,
            "first_token_s": _rounded(generation.seconds_to_first_token),
            "generation_s": _rounded(generation.seconds),
            "adapter_loads": generation.adapter_loads,
        }
        self._close()

    def add_response(self, message: Message) -> None:
        """Note the status; a Litestar `before_send` hook, which knows the route's template."""
        if message["type"] == "http.response.start":
            self._fields["status"] = message["status"]
            self._fields["method"] = self._scope.get("method")
            self._fields["route"] = self._scope.get("path_template", "unknown")

    def end_response(self) -> None:
        """Note the time: the response has been sent, or the client has left."""
        principal = self._scope.get("auth")
        if isinstance(principal, Principal):
            self._fields |= {"tenant": principal.tenant, "key": principal.key_id}
        self._ended = time.monotonic()
        self._fields["seconds"] = _rounded(self._ended - self._began)
        self._level = logging.DEBUG if self._scope["path"].startswith(PROBES) else logging.INFO
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if self._open:
            return
        logger.log(self._level, "request", extra=self._fields)
        if self._tracer is not None and self.parent is not None and self._level > logging.DEBUG:
            ended = max([self._ended, *(phase.ended for phase in self._phases)])
            self._tracer.export(self.parent, Phase("request", self._began, ended), self._phases, self._fields)

    def _note_phases(self, generation: Generation) -> None:
        """Note admission, queue, prefill, decode and settlement, as far as the generation came, and its adapter's
        load, which is a part of the queue."""
        began, now = generation.began, time.monotonic()
        ended = began + (generation.seconds or 0.0)
        times = [("admission", began)]
        if generation.seconds_to_first_token is not None:
            first = began + generation.seconds_to_first_token
            times += [("queue", min(began + generation.seconds_waited, first)), ("prefill", first), ("decode", ended)]
        else:
            times += [("queue", ended)]
        before = self._began
        for name, end in [*times, ("settlement", now)]:
            self._phases.append(Phase(name, before, end))
            before = end
        if generation.load is not None:
            start, end = generation.load
            self._phases.append(Phase("adapter load", began + start, began + end))


@asynccontextmanager
async def logged(scope: Scope, tracer: Tracer | None) -> AsyncIterator[None]:
    """Log the request that runs in the block, and trace it; lines within it carry its id and its trace's."""
    record = RequestRecord(scope, tracer)
    ids = {"request": traceable_id(scope)}
    if record.parent is not None:
        ids["trace"] = record.parent.trace_id
    token = _record.set(record)
    try:
        with structlog.contextvars.bound_contextvars(**ids):
            try:
                yield
            finally:
                record.end_response()
    finally:
        _record.reset(token)


async def note_response(message: Message, scope: Scope) -> None:  # noqa: ARG001  Litestar's signature
    """Note the status of a response: a Litestar `before_send` hook."""
    if (record := _record.get()) is not None:
        record.add_response(message)


def note_begun(_: Generation) -> None:
    """Keep the line open for a generation that has begun."""
    if (record := _record.get()) is not None:
        record.open_generation()


def note_ended(generation: Generation) -> None:
    """Add a generation that has ended to the line of its request."""
    if (record := _record.get()) is not None:
        record.close_generation(generation)


def _parent_of(scope: Scope) -> TraceParent | None:
    """Return the client's W3C trace context, if it sent a valid one."""
    sent = [value for name, value in cast(Any, scope)["headers"] if name.lower() == b"traceparent"]
    match = _traceparent.fullmatch(sent[0].decode("latin-1")) if len(sent) == 1 else None
    return TraceParent(match[1], match[2], bool(int(match[3], 16) & 1)) if match else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
