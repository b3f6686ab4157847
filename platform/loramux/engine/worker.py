"""The loop around the engine: commands in, steps, reports out. Runs on a thread or in a separate process.

The last report is always Stopped; if the engine was not told to stop, the report gives the reason of its end. If the
model cannot process a request, only this request is refused. An exception in a step ends the engine, because pages and
caches are then in an unknown state.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
from transformers.utils.logging import disable_progress_bar

from loramux.common import logs
from loramux.common.garbage import freeze_garbage
from loramux.common.sampling import range_fault
from loramux.common.settings.file import Settings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import (
    Cancel,
    Command,
    EngineCount,
    EngineFault,
    Lift,
    ModelFacts,
    Pin,
    Ready,
    Report,
    Request,
    Retire,
    Shutdown,
    StepReport,
    Stopped,
    Submit,
    TokenEvent,
    Unpin,
)
from loramux_adapters.errors import BaseUnusable

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of an engine that has requests and waits, for example for an adapter."""

DIGEST_DIGITS = 64
"""Hexadecimal digits of SHA-256."""

MAX_WAIT_S = 3600.0
"""Longest wait for a command, in seconds: because a lock does not accept a time-out as long as the longest deadline."""

PARENT_CHECK_S = 2.0
"""Seconds between two checks that the parent process is still there."""

Inbox = queue.SimpleQueue[Command | None]
"""Commands for the loop. The entry None wakes the loop without a command, because an adapter has arrived."""


def serve(
    settings: Settings, inbox: Inbox, send: Callable[[Report], None], loaded: Callable[[], None] = lambda: None
) -> None:
    """Load the model, call `loaded`, then step until a Shutdown comes. The last report is Stopped."""
    reason = None
    try:
        engine = build_engine(load_model(settings), settings, wake=lambda: inbox.put(None))
        try:
            loaded()
            send(Ready(engine.facts))
            _loop(engine, inbox, send)
        finally:
            engine.close()
    except (UnsupportedModel, BaseUnusable) as refusal:
        reason = str(refusal)
    except Exception as error:
        logger.exception("the engine has stopped")
        reason = f"{type(error).__name__}: {error}"
    send(Stopped(reason))


def _loop(engine: Engine, inbox: Inbox, send: Callable[[Report], None]) -> None:
    stopping = False
    engine.announce = send
    send(StepReport([], engine.stats()))  # pages and recordings of steps are known before the first request
    while not (stopping and engine.is_idle):
        wait = engine.wait_seconds
        arrived = _arrived(inbox, wait if engine.is_idle else min(wait, HEARTBEAT_S))
        # Requests wait, for example for an adapter: the report shows that the loop is alive.
        if not arrived and wait > HEARTBEAT_S and not engine.is_idle:
            send(StepReport([]))
            continue
        for command in arrived:
            stopping |= isinstance(command, Shutdown)
            _execute(engine, command, send)
        if report := engine.step():
            send(report)


def _arrived(inbox: Inbox, wait_seconds: float) -> list[Command | None]:
    """Return everything in the inbox; wait up to `wait_seconds` for the first command (inf: without a limit)."""
    arrived: list[Command | None] = []
    if wait_seconds > 0.0:
        with contextlib.suppress(queue.Empty):
            arrived.append(inbox.get(timeout=min(wait_seconds, MAX_WAIT_S) if math.isfinite(wait_seconds) else None))
    while not inbox.empty():
        arrived.append(inbox.get())
    return arrived


def _execute(engine: Engine, command: Command | None, send: Callable[[Report], None]) -> None:
    match command:
        case Submit(request):
            if fault := request_fault(request, engine.facts):
                ended = TokenEvent(request_id=request.id, finish_reason="error", fault=fault, count=EngineCount())
                send(StepReport([ended]))
            else:
                engine.submit(request)
        case Cancel(request_id):
            engine.cancel(request_id)
        case Retire(digest):
            engine.retire(digest)
        case Pin(ref, owner):
            engine.pin(ref, owner)
        case Unpin(digest, owner):
            engine.unpin(digest, owner)
        case Lift(services):
            engine.lift(services)
        case Shutdown() | None:
            pass


def request_fault(request: Request, facts: ModelFacts) -> EngineFault | None:
    """Return the reason why the model cannot process `request`. One id outside its tables would raise an error in the
    step of all requests.

    The serving layer refuses such requests with the field's name. This check protects the engine from every caller.
    """
    sampling, size = request.sampling, max(facts.vocab_size, request.num_tokens)
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("output", request.output_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logprob_token_ids", sampling.logprob_token_ids),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            return EngineFault("internal_error", f"{name} has a token outside the model's 0 to {size - 1}.")
    if message := _length_fault(request) or _image_fault(request, facts):
        return EngineFault("internal_error", message)
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= size:
        return EngineFault("internal_error", f"logprobs must be 0 to {size}.")
    if message := range_fault(sampling):
        return EngineFault("internal_error", message)
    return None


def _length_fault(request: Request) -> str | None:
    """Return the fault in the request's numbers of prompt and output tokens; None if they are valid."""
    if not request.prompt_token_ids or request.sampling.max_tokens < 1:
        return "A request needs at least one prompt token and max_tokens of at least 1."
    if request.pooling is not None and (request.output_token_ids or request.sampling.prompt_logprobs is not None):
        return "A request with pooling generates nothing and scores nothing."
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        return "A request needs fewer tokens of output already than max_tokens."
    return None


def _image_fault(request: Request, facts: ModelFacts) -> str | None:
    """Return the fault in the places of the request's images; None if they are valid."""
    if request.images and not facts.images:
        return "The model reads no images."
    end = 0
    for image in request.images:
        if image.start < end or image.num_tokens < 1 or len(image.digest) != DIGEST_DIGITS:
            return "A request's images need their digests, and their placeholders one after the other."
        end = image.start + image.num_tokens
    return "A request's images need their placeholders in its prompt." if end > len(request.prompt_token_ids) else None


def serve_process(settings: Settings, connection: Connection) -> None:
    """Serve as a child process: commands and reports cross `connection` as msgpack.

    The parent handles signals: it drains and then sends Shutdown. When the parent dies, its end of the connection is
    closed. This process then ends at once, even during a step or while it loads the model.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure(settings.logging.format, settings.logging.level)
    disable_progress_bar()  # a server's log is no terminal
    inbox: Inbox = queue.SimpleQueue()
    encoder = msgspec.msgpack.Encoder()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True, name="commands").start()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True, name="parent").start()
    serve(settings, inbox, lambda report: connection.send_bytes(encoder.encode(report)), freeze_garbage)


def _receive(connection: Connection, inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(Command)
    try:
        while True:
            command = decoder.decode(connection.recv_bytes())
            if isinstance(command, Submit):
                command = command.with_patches([connection.recv_bytes() for _ in command.request.images])
            inbox.put(command)
            del command  # its patches are large, and the next command may come late
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone, and with it all requests
    except msgspec.MsgspecError:
        logger.exception("the parent sent an unreadable command")
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    """End when the parent has died, even if another process still holds its end of the connection open."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
