"""The loop around the engine: commands in, steps, reports out. Runs on a thread or as a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
from transformers.utils.logging import disable_progress_bar

from loramux.engine.engine import Engine
from loramux.engine.messages import Cancel, Command, Pin, Ready, Report, Retire, Shutdown, Stopped, Submit, Unpin
from loramux.engine.model import load_model
from loramux.settings import Settings

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[Command | None]
"""None wakes the loop without a command: an adapter has arrived."""


def serve(settings: Settings, inbox: Inbox, send: Callable[[Report], None]) -> None:
    """Load the model, then step until told to stop. Always sends Stopped as its last word."""
    try:
        engine = Engine(load_model(settings), settings, wake=lambda: inbox.put(None))
        send(Ready(engine.facts))
        _loop(engine, inbox, send)
        engine.close()
    except Exception as error:
        logger.exception("the engine has stopped")
        send(Stopped(f"{type(error).__name__}: {error}"))
    else:
        send(Stopped())


def _loop(engine: Engine, inbox: Inbox, send: Callable[[Report], None]) -> None:
    stopping = False
    while not (stopping and engine.idle):
        for command in _arrived(inbox, wait=engine.idle or engine.stalled, patience=engine.patience):
            stopping |= isinstance(command, Shutdown)
            _obey(engine, command)
        if report := engine.step():
            send(report)


def _arrived(inbox: Inbox, *, wait: bool, patience: float | None) -> list[Command]:
    """Everything in the inbox; waits for the first, `patience` seconds at most, where nothing can run without it."""
    arrived: list[Command | None] = []
    if wait:
        with contextlib.suppress(queue.Empty):
            arrived.append(inbox.get(timeout=patience))
    while not inbox.empty():
        arrived.append(inbox.get())
    return [command for command in arrived if command is not None]


def _obey(engine: Engine, command: Command) -> None:
    match command:
        case Submit(request):
            engine.submit(request)
        case Cancel(request_id):
            engine.cancel(request_id)
        case Retire(digest):
            engine.retire(digest)
        case Pin(ref, owner):
            engine.pin(ref, owner)
        case Unpin(digest, owner):
            engine.unpin(digest, owner)
        case Shutdown():
            pass


def serve_process(settings: Settings, connection: Connection) -> None:
    """`serve` as a child process: commands and reports cross `connection` as msgpack.

    Signals are the parent's affair: it drains and then sends Shutdown. A parent that died closes the connection, and
    then there is nobody left to serve.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    disable_progress_bar()  # a server's log is no terminal
    inbox: Inbox = queue.SimpleQueue()
    encoder = msgspec.msgpack.Encoder()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True, name="inbox").start()
    serve(settings, inbox, lambda report: connection.send_bytes(encoder.encode(report)))


def _receive(connection: Connection, inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(Command)
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)
        inbox.put(decoder.decode(data))
