"""Secrets of keys, and the pepper: the server's own secret under which their MACs are stored."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from loramux.records import Database
from loramux.records.keys import PepperRepository
from loramux.records.locks import PEPPER, advisory_lock
from loramux.tenants.audit import Changes
from loramux.tenants.errors import PepperError

SECRET_PREFIX = "sk-lm-"  # noqa: S105 - what every secret starts with, itself no secret
RANDOM_LENGTH = 43
"""Characters of 256 random bits."""
TAG_LENGTH = 8
"""Characters of the 48-bit tag at a secret's end. Releases before the tag made secrets without one."""
PEPPER_BYTES = 32
CHECK_TEXT = "loramux pepper check"
FIELD = "pepper_file"
_NEEDED = "without the right one no API key is valid"
_WAY_OUT = (
    "Restore the file from its backup (docs/operations/backup.md). Where there is none, "
    "`loramux key replace-pepper --config FILE` makes a new one and revokes every key"
)

logger = logging.getLogger(__name__)


def new_secret(pepper: bytes) -> str:
    """Return a new key's secret: the prefix, 256 random bits, and a tag under the pepper.

    The tag lets a server tell an invented secret from a real one without asking the database.
    """
    untagged = SECRET_PREFIX + secrets.token_urlsafe(32)
    return untagged + _tag(pepper, untagged)


def mac(pepper: bytes, secret: str) -> bytes:
    """Return what is stored of a secret: HMAC-SHA256 under the pepper."""
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def is_secret(text: str) -> bool:
    """Return whether `text` has the form of a key's secret."""
    length = len(text) - len(SECRET_PREFIX) - RANDOM_LENGTH
    return text.startswith(SECRET_PREFIX) and length in (0, TAG_LENGTH) and text.isascii()


def has_tag(pepper: bytes, secret: str) -> bool | None:
    """Return whether the secret's tag is right; None for a secret of an older release, which has none."""
    end = len(SECRET_PREFIX) + RANDOM_LENGTH
    tag = secret[end:]
    return hmac.compare_digest(tag, _tag(pepper, secret[:end])) if tag else None


def _tag(pepper: bytes, untagged: str) -> str:
    digest = hmac.digest(pepper, b"tag of " + untagged.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[: TAG_LENGTH * 6 // 8]).decode()


async def open_pepper(database: Database, path: Path) -> bytes:
    """Return the pepper in `path`, made there (mode 0600) for a new database.

    Raises PepperError where the file is missing, too short, or not the one that the database's keys were made with: a
    start with another pepper would refuse every key.
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
    """Put a new pepper into `path` after the old one is lost, and revoke every key; return their number."""
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
    """Write the whole file before it has its name, and replace none that another process made meanwhile."""
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
