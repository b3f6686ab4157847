"""The channel's frames: how a front and an engine on another machine speak.

A front connects a DEALER socket to the engine's ROUTER socket; CURVE encrypts, and proves both keys. One connection is
one session: the engine knows a connection by an id of its own making, so that nothing that a front sends can take it
for another one, and a connection that was lost is never continued. What ran on it goes on as after an engine's death.

    front ── HELLO ──> engine           a frame is two parts: its kind, and its body
          <── WELCOME or REFUSAL ──
          ── COMMAND*, BEAT* ──>        commands as over the pipe; a beat says how many bytes the front has processed
          <── REPORT* ──                Ready first, Stopped last; at most WINDOW_BYTES that no beat has confirmed
          ── BYE ──>                    the front leaves; also from the engine, to a connection that it does not know

The engine's end needs no beats: libzmq's own heartbeats break the connection to a process that is stopped, or a machine
that is gone, and never wait for the interpreter's lock.
"""

from __future__ import annotations

import json
import os
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import msgspec
import zmq

from loramux.engine.messages import Command, Report

HELLO, WELCOME, REFUSAL, COMMAND, REPORT, BEAT, BYE = (bytes([kind]) for kind in range(1, 8))

MEANING = 1
"""Raise it where a message keeps its form and changes its meaning."""
MAX_FRAME_BYTES = 256 << 20
"""The longest frame; a prompt of a million tokens has 5 MB."""
MAX_UNSENT_BYTES = 64 << 20
"""Commands that may wait for an engine that does not read; beyond, it counts as lost."""
WINDOW_BYTES = 4 << 20
"""Reports on their way to a front, in libzmq's queues and before its event loop."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The front's first frame. Its form stays readable for every release: fields are only added, with defaults."""

    version: str
    """`message_version` of the front."""
    release: str
    base: str
    """Name of the base that the front wants."""
    front: str
    """For the log."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer; REFUSAL has a sentence instead."""

    version: str
    release: str


@cache
def message_version() -> str:
    """Return a digest of every message's form: two processes with the same one understand each other."""
    schema, components = msgspec.json.schema_components([Command, Report])
    text = json.dumps([MEANING, *map(_canonical, (schema, components))], sort_keys=True)
    return blake2b(text.encode(), digest_size=6).hexdigest()


def release() -> str:
    """Return the installed release."""
    return version("loramux")


def version_conflict(front: Hello | Welcome, engine: Hello | Welcome) -> str | None:
    """Return why the two cannot speak to each other, as a sentence for an operator."""
    if front.version == engine.version:
        return None
    return (
        f"the engine (loramux {engine.release}) has other messages than this server (loramux {front.release}): "
        f"{engine.version} against {front.version}; install the same release on both"
    )


def _canonical(schema: Any) -> Any:
    """Drop docstrings, which change no message, and write 100 and 100.0 alike: typing caches equal annotations."""
    if isinstance(schema, dict):
        return {key: _canonical(value) for key, value in schema.items() if key != "description"}
    if isinstance(schema, (list, tuple)):
        return [_canonical(value) for value in schema]
    return float(schema) if isinstance(schema, int) else schema


def configure(socket: zmq.Socket[bytes], lease_s: float) -> None:
    """Set what both ends have in common: heartbeats, and no wait for a peer that is gone.

    A socket that is left unread does not see heartbeats, so both ends always read; WINDOW_BYTES and MAX_UNSENT_BYTES
    bound what they hold.
    """
    socket.set(zmq.LINGER, 200)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HEARTBEAT_IVL, max(50, round(250 * lease_s)))
    socket.set(zmq.HEARTBEAT_TIMEOUT, round(1000 * lease_s))
    socket.set(zmq.HANDSHAKE_IVL, 30_000)


class Waker:
    """Ends a poll of another thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def wake(self) -> None:
        """End the poll, or the next one; from any thread."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Wait for the next `wake`."""
        os.eventfd_read(self._fd)
