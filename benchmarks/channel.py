"""The time that a report of a step and a command take between an engine and its server, over a pipe, a thread and
sockets.

    python benchmarks/channel.py --requests 64 --rounds 2000

A worker without a model answers each command with one report of as many tokens as there are requests. The measured time
is a round trip: from a command's `send` to its report on the server's event loop. The two sides are two processes, as
in production. On a busy machine the figures include delays of the system's scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from loramux.engine.messages import (
    Cancel,
    Command,
    ModelFacts,
    Ready,
    Report,
    Request,
    SamplingParams,
    StepLimits,
    StepReport,
    Submit,
    TokenEvent,
)
from loramux.fleet.remote import EnginePlace, RemoteChannel
from loramux.fleet.serving import EngineListener
from loramux.fleet.sessions import FrontSessions
from loramux.fleet.wire import KeyPair, new_pair

FACTS = ModelFacts(
    max_model_len=256,
    vocab_size=260,
    eos_token_ids=(256,),
    dtype="float32",
    pages_total=64,
    block_size=16,
    kv_cache_dtype="auto",
    weights="none",
    hidden_size=64,
    limits=StepLimits(64, 1024, 256),
)


def answer(inbox: queue.SimpleQueue[Command], send: Callable[[Report], None]) -> None:
    """Answer each Cancel with a token of every request."""
    send(Ready(FACTS))
    running: list[str] = []
    while True:
        command = inbox.get()
        if isinstance(command, Submit):
            running.append(command.request.id)
        elif isinstance(command, Cancel):
            send(StepReport([TokenEvent(request_id=id, token_id=1) for id in running]))


class NoFiles:
    """No request has an adapter."""

    find = fetch = None


def listen(address: str, pair: KeyPair, ready: Connection) -> None:
    listener = EngineListener("base", pair, lambda _: True, 30.0)
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    sessions = FrontSessions(inbox.put, NoFiles(), listener.wake)
    ready.send(listener.bind(address))
    listener.start(sessions)
    answer(inbox, sessions.report)


def serve_pipe(connection: Connection) -> None:
    """The engine's end of a pipe, as in `engine.worker.serve_process`: a thread reads, and the worker's own thread
    sends.
    """
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Command)

    def receive() -> None:
        while True:
            inbox.put(decoder.decode(connection.recv_bytes()))

    threading.Thread(target=receive, daemon=True).start()
    answer(inbox, lambda report: connection.send_bytes(encoder.encode(report)))


class Pipe:
    """The server's end of a pipe, as in `ProcessChannel`: one thread reads, and another thread writes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()

    def open(self, on_report: Callable[[Report], None]) -> None:
        threading.Thread(target=self._read, args=(on_report,), daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, command: Command) -> None:
        self._outbox.put(self._encoder.encode(command))

    def join(self, _: float) -> None:
        """Leave the threads: they are daemons."""

    def _read(self, on_report: Callable[[Report], None]) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        with contextlib.suppress(EOFError):
            while True:
                on_report(decoder.decode(self._connection.recv_bytes()))

    def _write(self) -> None:
        while True:
            self._connection.send_bytes(self._outbox.get())


async def measure(channel: Any, requests: int, rounds: int) -> list[float]:
    """Return the round trips in microseconds, on an event loop as a server has it."""
    loop = asyncio.get_running_loop()
    reports: asyncio.Queue[Report] = asyncio.Queue()
    channel.open(lambda report: loop.call_soon_threadsafe(reports.put_nowait, report))
    assert isinstance(await reports.get(), Ready)
    for number in range(requests):
        sampling = SamplingParams(max_tokens=1)
        channel.send(Submit(Request(id=f"r{number:035}", tenant="t", prompt_token_ids=[1], sampling=sampling)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        channel.send(Cancel(f"r{0:035}"))
        report = await reports.get()
        times.append(1e6 * (time.perf_counter() - began))
        assert isinstance(report, StepReport)
        assert len(report.events) == requests
        await asyncio.sleep(0.001)
    channel.join(1.0)
    return times


def over(kind: str, requests: int, rounds: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    channel: Any
    if kind == "pipe":
        process = context.Process(target=serve_pipe, args=(theirs,), daemon=True)
        process.start()
        channel = Pipe(ours)
    else:
        with tempfile.TemporaryDirectory() as folder:
            address = f"ipc://{Path(folder) / 'engine'}" if kind == "ipc" else "tcp://127.0.0.1:0"
            pair = new_pair()
            process = context.Process(target=listen, args=(address, pair, theirs), daemon=True)
            process.start()
            place = EnginePlace(ours.recv(), pair.public)
            channel = RemoteChannel(lambda: place, "base", new_pair(), 30.0)
            times = asyncio.run(measure(channel, requests, rounds))
        process.kill()
        return times
    times = asyncio.run(measure(channel, requests, rounds))
    process.kill()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--channels", nargs="+", default=["pipe", "ipc", "tcp"])
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    for kind in arguments.channels:
        times = sorted(over(kind, arguments.requests, arguments.rounds))
        quantiles = {f"p{share}": round(times[len(times) * share // 100]) for share in (50, 90, 99)}
        row = {"channel": kind, "round_trip_us": quantiles, "mean_us": round(statistics.fmean(times)), "load": load}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
