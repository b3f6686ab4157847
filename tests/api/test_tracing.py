"""Traces, as a collector receives them over OTLP."""

from __future__ import annotations

import http.server
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from peft_uploads import form, make_adapter
from running_server import running
from scripted_engine import ScriptedEngine
from site_fixture import make_keys, make_settings

from loramux.common.settings.server import TracingSettings
from loramux_api.app import create_app

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PHASES = ["admission", "queue", "prefill", "decode", "settlement"]


@dataclass
class Collector:
    url: str
    spans: list[Span] = field(default_factory=list)

    def of_trace(self, trace: str, count: int) -> list[Span]:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            found = [span for span in self.spans if span.trace_id.hex() == trace]
            if len(found) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{len(self.spans)} spans came, not {count} of {trace}")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["x-team"] == "blue"
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            made.spans += [span for one in sent.resource_spans for two in one.scope_spans for span in two.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Collector(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Traced:
    url: str
    key: str
    engine: ScriptedEngine

    def complete(self, **headers: str) -> httpx.Response:
        sent = {"Authorization": f"Bearer {self.key}"} | headers
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        return httpx.post(f"{self.url}/v1/completions", headers=sent, json=body, timeout=30)


@pytest.fixture(scope="module", params=[0.0])
def traced(
    request: pytest.FixtureRequest, base_dir: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Traced]:
    """A server that traces what clients ask it to, and this part of the rest."""
    settings = make_settings(base_dir, tmp_path_factory.mktemp("traced"))
    tracing = TracingSettings(endpoint=collector.url, headers={"x-team": "blue"}, sample_ratio=request.param)
    settings = msgspec.structs.replace(settings, tracing=tracing)
    keys = make_keys(settings)
    engine = ScriptedEngine()
    with running(create_app(settings, engine), "granian") as server:
        yield Traced(server.url, keys["acme"], engine)


@pytest.fixture(scope="module")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("adapter"))


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes}


def test_trace_reaches_from_the_clients_span_to_the_settlement(traced: Traced, collector: Collector) -> None:
    answer = traced.complete(traceparent=f"00-{TRACE}-{PARENT}-01").raise_for_status().json()
    spans = collector.of_trace(TRACE, 1 + len(PHASES))
    (request,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    phases = sorted((span for span in spans if span is not request), key=lambda span: span.start_time_unix_nano)
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/completions", PARENT)
    assert [span.name for span in phases] == PHASES
    assert {span.parent_span_id for span in phases} == {request.span_id}
    assert phases[0].start_time_unix_nano == request.start_time_unix_nano
    for one, following in itertools.pairwise(phases):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= request.end_time_unix_nano
    assert abs(request.end_time_unix_nano / 1e9 - time.time()) < 60
    found = attributes(request)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.response.id"] == answer["id"]
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert "hello" not in str(spans)


def test_adapters_load_is_a_span_within_the_queues_time(
    traced: Traced, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "3" * 32
    monkeypatch.setattr(traced.engine, "load", (2e-5, 8e-5))
    traced.complete(traceparent=f"00-{trace}-{PARENT}-01").raise_for_status()
    spans = {span.name: span for span in collector.of_trace(trace, 2 + len(PHASES))}
    load, queue = spans["adapter load"], spans["queue"]
    assert load.parent_span_id == queue.parent_span_id
    assert load.start_time_unix_nano - queue.start_time_unix_nano == pytest.approx(2e4, abs=2)
    assert load.end_time_unix_nano - load.start_time_unix_nano == pytest.approx(6e4, abs=2)


@pytest.mark.parametrize("traced", [1.0], indirect=True)
def test_background_job_is_a_separate_trace(traced: Traced, collector: Collector, adapter: Path) -> None:
    sent = {"Authorization": f"Bearer {traced.key}"}
    httpx.post(f"{traced.url}/v1/adapters", headers=sent, timeout=60, **form(adapter, "traced")).raise_for_status()
    until = time.monotonic() + 120
    while not (found := [span for span in collector.spans if span.name == "job upload"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not found[0].parent_span_id
    assert str(attributes(found[0])["loramux.job"]).startswith("upload_")
    assert "traced" not in str(found[0].attributes)


def test_client_decides_about_its_trace_and_the_ratio_about_others(traced: Traced, collector: Collector) -> None:
    other, unwanted = "1" * 32, "2" * 32
    traced.complete(traceparent=f"00-{unwanted}-{PARENT}-00").raise_for_status()
    traced.complete().raise_for_status()
    before = len(collector.spans)
    traced.complete(traceparent=f"00-{other}-{PARENT}-01").raise_for_status()
    collector.of_trace(other, 6)
    assert {span.trace_id.hex() for span in collector.spans[before:]} == {other}
    assert all(span.trace_id.hex() != unwanted for span in collector.spans)


@pytest.mark.parametrize("sent", ["", "00-" + "0" * 32 + f"-{PARENT}-01", "ff-x", f"00-{TRACE}-{PARENT}-01-more"])
def test_invalid_traceparent_is_ignored(traced: Traced, sent: str) -> None:
    assert traced.complete(traceparent=sent).status_code == 200
