"""Traces over OTLP: the spans of each request, from the client's `traceparent` to its settlement.

A request's phases are noted with their times while it runs (`request_log`). When it has ended, its spans are made from
them and leave in batches on a thread of their own, so that a request that is not sampled costs a comparison.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from loramux.jobs import JobRun
from loramux.settings import SettingsError, TracingSettings

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

# The names of OpenTelemetry's conventions for generative AI, which are still in development: nowhere else.
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
    """The place of a request in a trace: the client's (W3C `traceparent`), or a new trace's."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str | None = None
    """The client's span; None: the request begins the trace."""
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
        """Raise SettingsError where the extra `otel` is not installed."""
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
        """Send the span of a request, and those of its phases. `fields` are those of its log line."""
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
        """Send the span of a background job: a trace of its own, since it outlives the request that asked for it."""
        self._ids.chosen = int(self.new_trace().trace_id, 16)
        at = _unix_time()
        span = self._tracer.start_span(f"job {run.kind}", start_time=at(run.began), attributes={"loramux.job": run.id})
        span.end(at(run.ended))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _unix_time() -> Callable[[float], int]:
    """Return the function from seconds of the monotonic clock to nanoseconds of Unix time."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda seconds: offset + int(seconds * 1e9)


def _attributes(fields: dict[str, object]) -> dict[str, AttributeValue]:
    names = GEN_AI | HTTP | {name: f"loramux.{name}" for name in OWN} | {"request": "loramux.request_id"}
    found = {names[name]: value for name, value in fields.items() if name in names}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}
