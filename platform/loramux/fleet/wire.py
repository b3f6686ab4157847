"""The channel's frames and keys: the communication between a server and an engine on another machine, and their
authentication.

A server connects a DEALER socket to the engine's ROUTER socket; CURVE encrypts the connection and proves both keys. One
connection is one session. The engine itself makes the id of a connection, so a server cannot pretend to be another
connection, and a lost connection is never continued. Requests on a lost connection continue as after an engine's death.

    server ── HELLO ──> engine          a frame has two parts, its kind and its body; a command's body comes before the
                                        patches of its images
           <── WELCOME or REFUSAL ──
           ── COMMAND*, BEAT* ──>       commands as over the pipe; a beat says how many bytes the server has processed
           <── REPORT* ──               Ready first, Stopped last; at most WINDOW_BYTES that no beat has confirmed
           ── BYE ──>                   the server leaves; also from the engine, to a connection that it does not know

The engine's end needs no beats. libzmq's own heartbeats break the connection to a stopped process or a lost machine,
and they never wait for the interpreter's lock.

Keys are CURVE key pairs in a folder, as `loramux engine keys` makes them:

    engine.secret    on the machines of engines     the engines' pair
    fronts.public    on the machines of engines     public keys of the servers that they serve, one a line
    front.secret     on a server's machine          the server's pair
    engine.public    on a server's machine          the one key that an engine must have

A secret file holds the secret and the public key, and only its owner may read it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from loramux.common.settings.file import SettingsError
from loramux.engine.messages import Command, Report

HELLO, WELCOME, REFUSAL, COMMAND, REPORT, BEAT, BYE = (bytes([kind]) for kind in range(1, 8))

MEANING = 2
"""Version of the messages' meaning: increase it if a message keeps its form but changes its meaning."""
MAX_FRAME_BYTES = 256 << 20
"""Longest part of a frame, in bytes; a prompt of a million tokens has 5 MB."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes of commands, without patches of images, that may wait for an engine that does not read; if there are more, the
engine counts as lost.
"""
WINDOW_BYTES = 4 << 20
"""Maximum bytes of unconfirmed reports to a server, in libzmq's queues and before the server's event loop."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A server's first frame. Its form stays readable for every release: fields are only added, with defaults."""

    version: str
    """`message_version` of the server."""
    release: str
    base: str
    """Name of the base that the server wants."""
    front: str
    """Name of the server in the engine's log."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to an accepted Hello. A REFUSAL has a sentence instead."""

    version: str
    release: str


@cache
def message_version() -> str:
    """Return a digest of every message's form: two processes with the same digest understand each other."""
    schema, components = msgspec.json.schema_components([Command, Report])
    text = json.dumps([MEANING, *map(_canonical, (schema, components))], sort_keys=True)
    return blake2b(text.encode(), digest_size=6).hexdigest()


def release() -> str:
    """Return the installed release."""
    return version("loramux")


def version_conflict(front: Hello | Welcome, engine: Hello | Welcome) -> str | None:
    """Return the reason why server and engine cannot communicate, as a sentence for an operator; None if they can."""
    if front.version == engine.version:
        return None
    return (
        f"the engine (loramux {engine.release}) has other messages than this server (loramux {front.release}): "
        f"{engine.version} against {front.version}; install the same release on both"
    )


def _canonical(schema: Any) -> Any:
    """Drop docstrings, which change no message, and write 100 and 100.0 alike, because typing caches equal
    annotations."""
    if isinstance(schema, dict):
        return {key: _canonical(value) for key, value in schema.items() if key != "description"}
    if isinstance(schema, (list, tuple)):
        return [_canonical(value) for value in schema]
    return float(schema) if isinstance(schema, int) else schema


def configure(socket: zmq.Socket[bytes], lease_s: float) -> None:
    """Set the options of both ends: heartbeats, and no wait for a peer that is gone.

    A socket that is not read does not see heartbeats, so both ends always read. WINDOW_BYTES and MAX_UNSENT_BYTES bound
    the bytes that they hold.
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
        """End the current poll, or the next one. Any thread may call this function."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Reset the descriptor, which lets the next poll wait for a `wake`."""
        os.eventfd_read(self._fd)


ENGINE_SECRET, ENGINE_PUBLIC, FRONT_SECRET, FRONTS_PUBLIC = (
    "engine.secret",
    "engine.public",
    "front.secret",
    "fronts.public",
)
MAKE_THEM = "`loramux engine keys` makes them"

_key = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Pattern of a key: Z85 of 32 bytes."""


class KeyPair(NamedTuple):
    """A CURVE key pair, in libzmq's text form."""

    secret: bytes
    public: bytes


def new_pair() -> KeyPair:
    """Make a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(secret, public)


def write_keys(folder: Path) -> list[Path]:
    """Write the four files of a new fleet; return them. Raises SettingsError if one of them already exists."""
    if taken := [
        name for name in (ENGINE_SECRET, ENGINE_PUBLIC, FRONT_SECRET, FRONTS_PUBLIC) if (folder / name).exists()
    ]:
        raise SettingsError(f"{folder / taken[0]} is there already; remove it first if no engine and no server uses it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine, front = new_pair(), new_pair()
    written = [
        _write(folder / ENGINE_SECRET, (engine.secret, engine.public), 0o600),
        _write(folder / ENGINE_PUBLIC, (engine.public,), 0o644),
        _write(folder / FRONT_SECRET, (front.secret, front.public), 0o600),
    ]
    return [*written, _write(folder / FRONTS_PUBLIC, (front.public,), 0o644)]


def read_pair(file: Path) -> KeyPair:
    """Read a secret file. Raises SettingsError."""
    keys = _keys_in(file)
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise SettingsError(f"fleet.keys: others than its owner may read {file}; run `chmod 600 {file}`")
    if len(keys) != 2 or zmq.curve_public(keys[0]) != keys[1]:
        raise SettingsError(f"fleet.keys: {file} is no key pair; {MAKE_THEM}")
    return KeyPair(*keys)


def read_public(file: Path) -> bytes:
    """Read the one public key of a file. Raises SettingsError."""
    keys = _keys_in(file)
    if len(keys) != 1:
        raise SettingsError(f"fleet.keys: {file} has {len(keys)} keys instead of one; {MAKE_THEM}")
    return keys[0]


def read_authorized(file: Path) -> frozenset[bytes]:
    """Read the public keys of the servers that an engine serves. Raises SettingsError."""
    return frozenset(_keys_in(file))


def _keys_in(file: Path) -> list[bytes]:
    """Return the keys of a file: a key is a line's first word, and the rest of the line is a remark."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"fleet.keys: {file} cannot be read: {reason}; {MAKE_THEM}") from None
    words = [line.split()[0] for line in lines if line.strip() and not line.startswith("# ")]
    for word in words:
        if not _key.fullmatch(word):
            raise SettingsError(f"fleet.keys: {file} has a line that is no key; {MAKE_THEM}")
    return [word.encode() for word in words]


def _write(file: Path, keys: Iterable[bytes], mode: int) -> Path:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(b"".join(key + b"\n" for key in keys))
    return file
