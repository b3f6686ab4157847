"""Keys of the channel: CURVE key pairs in a folder, as `loramux engine keys` makes them.

    engine.secret    on the machines of engines     the engines' pair
    fronts.public    on the machines of engines     public keys of the servers that they serve, one a line
    front.secret     on a server's machine          the server's pair
    engine.public    on a server's machine          the one key that an engine must have

A secret file holds the secret and the public key, and only its owner may read it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import zmq

from loramux.settings import SettingsError

ENGINE_SECRET, ENGINE_PUBLIC, FRONT_SECRET, FRONTS_PUBLIC = (
    "engine.secret",
    "engine.public",
    "front.secret",
    "fronts.public",
)
MAKE_THEM = "`loramux engine keys` makes them"

_key = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 of 32 bytes."""


class KeyPair(NamedTuple):
    """A CURVE key pair, in libzmq's text form."""

    secret: bytes
    public: bytes


def new_pair() -> KeyPair:
    """Make a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(secret, public)


def write_keys(folder: Path) -> list[Path]:
    """Write the four files of a new fleet; return them. Raises SettingsError where one is there already."""
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
