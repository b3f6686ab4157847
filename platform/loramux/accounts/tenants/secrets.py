"""Secrets of keys. Secrets are made with the pepper; invalid secrets are refused at a constant cost.

The pepper is the server's own secret, under which the MACs of keys' secrets are stored.

An invalid credential costs no statement in the database and bounded memory. A secret of this release ends with a tag
that is made with the pepper, so an invented secret is refused by a computation. A secret of an older release has no
tag. Existing secrets without a tag are recognised by prefixes of their MACs, which are read incrementally, at most once
per second. Revoked keys are remembered, because revocation is final. A secret that passes all three checks is looked
up.

Failures are counted by client address. An address with too many failures gets 429 instead of 401, but only for invalid
credentials. A valid key from the same address (an office, a proxy) is never affected.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from loramux.accounts.tenants.entities import Changes
from loramux.accounts.tenants.errors import InvalidKey, PepperError, TooManyFailures
from loramux.common.units import MINUTE, SECOND
from loramux.data.records.credentials import CredentialRepository, PepperRepository
from loramux.data.records.database import PEPPER, Database, advisory_lock

SECRET_PREFIX = "sk-lm-"  # noqa: S105 - what every secret starts with, itself no secret
RANDOM_LENGTH = 43
"""Characters of 256 random bits."""
TAG_LENGTH = 8
"""Characters of the 48-bit tag at a secret's end. Older releases made secrets without a tag."""
PEPPER_BYTES = 32
CHECK_TEXT = "loramux pepper check"
FIELD = "pepper_file"
_NEEDED = "without the right one no API key is valid"
_WAY_OUT = (
    "Restore the file from its backup (docs/operations/backup.md). Where there is none, "
    "`loramux key replace-pepper --config FILE` makes a new one and revokes every key"
)

MAX_REVOKED = 10_000
"""Maximum number of remembered revoked keys. The least recently used key is forgotten first."""
MAX_ADDRESSES = 10_000
"""Maximum number of addresses whose failures are counted. The address with the oldest failure is forgotten first."""
MAX_FAILURES = 300
"""Maximum number of failures of an address. One failure is forgiven every second."""
PREFIX_BYTES = 8
REFRESH = SECOND
OVERLAP = MINUTE
"""The period that is read again each time, because servers' clocks differ, and rows are committed later than their
times.
"""

logger = logging.getLogger(__name__)


def new_secret(pepper: bytes) -> str:
    """Return a new key's secret: the prefix, 256 random bits, and a tag that is made with the pepper.

    With the tag, a server can distinguish an invented secret from a real secret without a query of the database.
    """
    untagged = SECRET_PREFIX + secrets.token_urlsafe(32)
    return untagged + _tag(pepper, untagged)


def mac(pepper: bytes, secret: str) -> bytes:
    """Return the stored form of a secret: HMAC-SHA256 under the pepper."""
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def is_secret(text: str) -> bool:
    """Return whether `text` has the form of a key's secret."""
    length = len(text) - len(SECRET_PREFIX) - RANDOM_LENGTH
    return text.startswith(SECRET_PREFIX) and length in (0, TAG_LENGTH) and text.isascii()


def has_tag(pepper: bytes, secret: str) -> bool | None:
    """Return whether the secret's tag is right; None for a secret of an older release, which has no tag."""
    end = len(SECRET_PREFIX) + RANDOM_LENGTH
    tag = secret[end:]
    return hmac.compare_digest(tag, _tag(pepper, secret[:end])) if tag else None


def _tag(pepper: bytes, untagged: str) -> str:
    digest = hmac.digest(pepper, b"tag of " + untagged.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[: TAG_LENGTH * 6 // 8]).decode()


async def open_pepper(database: Database, path: Path) -> bytes:
    """Return the pepper in the file `path`. For a new database, create the file with mode 0600.

    Raises PepperError if the file is missing or too short, or if the database's keys were made with another pepper.
    With a wrong pepper, a server would refuse every key.
    """
    async with database.begin() as session:
        await advisory_lock(session, PEPPER)
        repository = PepperRepository(session)
        stored = await repository.check_value()
        if not _is_there(path):
            if stored is not None or await repository.has_keys():
                raise PepperError(f"the pepper file {path} is missing, and {_NEEDED}. {_WAY_OUT}", FIELD)
            try:
                _create_pepper(path)
            except OSError as error:
                raise PepperError(f"the pepper file {path} cannot be written: {error.strerror}", FIELD) from None
        pepper = _read_pepper(path)
        value = mac(pepper, CHECK_TEXT)
        if stored is None:
            await repository.set_check_value(value)
        elif not hmac.compare_digest(stored, value):
            raise PepperError(f"the pepper in {path} is not the one of this database, and {_NEEDED}. {_WAY_OUT}", FIELD)
    return pepper


async def replace_pepper(changes: Changes, path: Path) -> int:
    """Write a new pepper to `path` after the old pepper was lost, and revoke every key; return their number."""
    async with changes.begin() as change:
        await advisory_lock(change.session, PEPPER)
        repository = PepperRepository(change.session)
        revoked = await repository.revoke_all(change.now)
        _create_pepper(path, replace=True)
        await repository.set_check_value(mac(_read_pepper(path), CHECK_TEXT))
        await change.note("pepper.replace", path.name, tenant=None)
    return revoked


def _read_pepper(path: Path) -> bytes:
    try:
        pepper = path.read_bytes()
        if path.stat().st_mode & 0o077:
            logger.warning("%s can be read by other users of this machine; its mode is set to 0600", path)
            with suppress(OSError):  # a read-only mount
                path.chmod(0o600)
    except OSError as error:
        raise PepperError(f"the pepper file {path} cannot be read: {error.strerror}", FIELD) from None
    if len(pepper) < PEPPER_BYTES:
        raise PepperError(
            f"{path} holds {len(pepper)} bytes and a pepper has at least {PEPPER_BYTES}; restore it from its backup",
            FIELD,
        )
    return pepper


def _is_there(path: Path) -> bool:
    return path.exists()


def _create_pepper(path: Path, *, replace: bool = False) -> None:
    """Create the file atomically: it gets its name after it is written. Do not replace a file that another process has
    made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(PEPPER_BYTES))
        file.flush()
        os.fsync(file.fileno())
    if replace:
        draft.replace(path)
        return
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


class FailedAttempts:
    """Failed authentications by client address."""

    def __init__(self) -> None:
        self._free_at: OrderedDict[str, int] = OrderedDict()
        """The instant at which all of an address's failures are forgiven, in microseconds."""

    def fail(self, address: str, now: int, why: InvalidKey) -> InvalidKey | TooManyFailures:
        """Count a failure; return the error to raise: `why` or TooManyFailures."""
        network = _network(address)
        free_at = max(now, self._free_at.pop(network, now)) + SECOND
        exceeded = free_at - now > MAX_FAILURES * SECOND
        if exceeded and free_at - now <= (MAX_FAILURES + 1) * SECOND:
            logger.warning("%s has sent %d invalid credentials in a row", network, MAX_FAILURES)
        self._free_at[network] = min(free_at, now + (MAX_FAILURES + 10) * SECOND)
        while len(self._free_at) > MAX_ADDRESSES:
            self._free_at.popitem(last=False)
        if not exceeded:
            return why
        return TooManyFailures(
            f"{why.message}. Your address has sent many invalid credentials: check the key before you retry.",
            why.field,
        )


class KnownKeys:
    """Decides whether a secret can belong to a key, if possible without the database."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        self._revoked: OrderedDict[bytes, None] = OrderedDict()
        self._untagged: set[bytes] = set()
        """MAC prefixes of all keys, to recognise secrets without a tag."""
        self._read_up_to = 0
        self._read_at: int | None = None
        self._lock = asyncio.Lock()

    async def possible_mac(self, secret: str) -> bytes | None:
        """Return the MAC to look up; None if no valid key has this secret."""
        if not is_secret(secret):
            return None
        tagged, digest = has_tag(self._pepper, secret), mac(self._pepper, secret)
        if tagged is False:
            return None
        if digest in self._revoked:
            self._revoked.move_to_end(digest)
            return None
        if tagged is None and digest[:PREFIX_BYTES] not in self._untagged:
            await self._read_new()
            return digest if digest[:PREFIX_BYTES] in self._untagged else None
        return digest

    def remember_revoked(self, digest: bytes) -> None:
        """Remember that no valid key has this MAC, now or later."""
        self._revoked[digest] = None
        while len(self._revoked) > MAX_REVOKED:
            self._revoked.popitem(last=False)

    async def _read_new(self) -> None:
        async with self._lock:
            now = self._database.now()
            if self._read_at is not None and 0 <= now - self._read_at < REFRESH:
                return
            async with self._database.read() as session:
                macs = await CredentialRepository(session).macs_since(self._read_up_to)
            self._untagged |= {one[:PREFIX_BYTES] for one in macs}
            self._read_at, self._read_up_to = now, max(0, now - OVERLAP)


def _network(address: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address, because a client can use every address of its /64
    network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
