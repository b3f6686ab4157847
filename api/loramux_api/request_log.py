"""One log line for each request, and its trace over OTLP: its ids, caller, usage, phases and end.

A `RequestRecord` notes phases with their times while the request runs. When the response is sent and the generation is
settled, it writes the line, and the `Tracer` makes spans of it. A separate thread sends the spans in batches; a request
that is not sampled costs only a comparison. A client's `traceparent` is continued.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import structlog
from litestar.types import Message, Scope

from loramux.common.identity import Principal
from loramux.common.jobs import JobRun
from loramux.common.settings.file import SettingsError
from loramux.common.settings.server import TracingSettings
from loramux.serving.generation import Generation
from loramux_api.headers import ignored_of, traceable_id

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


logger = logging.getLogger(__name__)

PROBES = ("/health", "/metrics")
"""Paths that are requested every few seconds; their lines have the level `debug`."""

# The names of OpenTelemetry's conventions for generative AI. These names may still change, so only this module uses
# them.
GEN_AI = {
    "kind": "gen_ai.operation.name",
    "base": "gen_ai.request.model",
    "completion": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
HTTP = {"method": "http.request.method", "route": "http.route", "status": "http.response.status_code"}
OWN = ("tenant", "key", "revision", "outcome", "adapter_loads")
"""Fields of the log line that become `loramux.NAME`."""
SERVER_FAULT = 500


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Place of the request in a trace: the client's (W3C `traceparent`), or that of a new trace."""

    trace_id: str
    """Id of the trace, 32 hexadecimal digits."""
    span_id: str | None = None
    """Id of the client's span; None: the request begins the trace."""
    is_sampled: bool = True


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request: its name, and its begin and end by the monotonic clock, in seconds."""

    name: str
    began: float
    ended: float


class Tracer:
    """Sends the spans of requests to a collector."""

    def __init__(self, settings: TracingSettings) -> None:
        """Raise SettingsError if the extra `otel` is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError:
            raise SettingsError("tracing.endpoint: traces need the extra `otel`: pip install 'loramux[otel]'") from None

        class ChosenIds(RandomIdGenerator):
            """Gives a new trace the id that the log lines of its request already have."""

            chosen = 0

            def generate_trace_id(self) -> int:
                return self.chosen

        assert settings.endpoint is not None, "a tracer has an endpoint"
        self._ids = ChosenIds()
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create({"service.name": settings.service_name, "service.version": version("loramux")}),
            id_generator=self._ids,
        )
        exporter = OTLPSpanExporter(f"{settings.endpoint.rstrip('/')}/v1/traces", headers=dict(settings.headers))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("loramux")

    def new_trace(self) -> TraceParent:
        """Return a new trace."""
        return TraceParent(secrets.token_hex(16))

    def export(self, parent: TraceParent, request: Phase, phases: list[Phase], fields: dict[str, object]) -> None:
        """Send the span of a request, and those of its phases. `fields` are the fields of the request's log line."""
        from opentelemetry import trace

        self._ids.chosen = int(parent.trace_id, 16)
        context = None
        if parent.span_id is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else trace.TraceFlags.DEFAULT)
            remote = trace.SpanContext(self._ids.chosen, int(parent.span_id, 16), is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        at = _unix_time()
        span = self._tracer.start_span(
            f"{fields.get('method', '')} {fields.get('route', 'unknown')}".strip(),
            context,
            trace.SpanKind.SERVER,
            _attributes(fields),
            start_time=at(request.began),
        )
        if not span.is_recording():
            return
        within = trace.set_span_in_context(span)
        for phase in phases:
            self._tracer.start_span(phase.name, within, start_time=at(phase.began)).end(at(phase.ended))
        status = fields.get("status")
        if isinstance(status, int) and status >= SERVER_FAULT:
            span.set_status(trace.StatusCode.ERROR)
        span.end(at(request.ended))

    def export_job(self, run: JobRun) -> None:
        """Send the span of a background job. A job has a separate trace, because it outlives the request that started
        it.
        """
        self._ids.chosen = int(self.new_trace().trace_id, 16)
        at = _unix_time()
        span = self._tracer.start_span(f"job {run.kind}", start_time=at(run.began), attributes={"loramux.job": run.id})
        span.end(at(run.ended))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _unix_time() -> Callable[[float], int]:
    """Return the function that converts seconds of the monotonic clock to nanoseconds of Unix time."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda seconds: offset + int(seconds * 1e9)


def _attributes(fields: dict[str, object]) -> dict[str, AttributeValue]:
    names = GEN_AI | HTTP | {name: f"loramux.{name}" for name in OWN} | {"request": "loramux.request_id"}
    found = {names[name]: value for name, value in fields.items() if name in names}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


_traceparent = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_record: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


class RequestRecord:
    """The log line of one request. The line is written when the response has been sent and the generation is settled.

    A generation ends after its response if the client has disconnected, or if an idempotency key keeps it running.
    """

    def __init__(self, scope: Scope, tracer: Tracer | None) -> None:
        self._scope = scope
        self._tracer = tracer
        self.parent = _parent_of(scope) or (tracer.new_trace() if tracer is not None else None)
        """Place of the request in a trace. None if the client sent no trace and the server makes none."""
        self._began = self._ended = time.monotonic()
        self._phases: list[Phase] = []
        self._fields: dict[str, Any] = {"request": traceable_id(scope)}
        self._open = 1
        self._level = logging.INFO

    def open_generation(self) -> None:
        """Delay the line until a generation has ended, which calls `close_generation`."""
        self._open += 1

    def close_generation(self, generation: Generation) -> None:
        """Add the usage and the end of a generation."""
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
            "image_tokens": usage.image,
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
        """Note the end of the response, which was sent, or whose client has disconnected."""
        principal = self._scope.get("auth")
        if isinstance(principal, Principal):
            self._fields |= {"tenant": principal.tenant, "key": principal.key_id}
        if ignored := ignored_of(self._scope):
            self._fields["ignored"] = ignored
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
        """Note the phases that the generation has reached (admission, queue, prefill, decode, settlement), and its
        adapter's load, which is a part of the queue.
        """
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
    """Log the request that runs in the block, and trace it. Log lines within the block have the request's id and its
    trace's id.
    """
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
    """Return the client's W3C trace context if it is valid."""
    sent = [value for name, value in cast(Any, scope)["headers"] if name.lower() == b"traceparent"]
    match = _traceparent.fullmatch(sent[0].decode("latin-1")) if len(sent) == 1 else None
    return TraceParent(match[1], match[2], bool(int(match[3], 16) & 1)) if match else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
