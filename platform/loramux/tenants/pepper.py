"""The server's secret that keys' secrets are MACed with, and the secrets themselves."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from loramux.tenants.errors import PepperError

SECRET_PREFIX = "sk-lm-"  # noqa: S105 - what every secret starts with, itself no secret
MAX_SECRET_LENGTH = 256
PEPPER_BYTES = 32


def new_secret() -> str:
    """A key's secret: 256 random bits behind the prefix."""
    return SECRET_PREFIX + secrets.token_urlsafe(32)


def mac(pepper: bytes, secret: str) -> bytes:
    """What is stored of a secret: HMAC-SHA256 under the pepper."""
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def is_secret(text: str) -> bool:
    """Whether `text` could be a key's secret at all."""
    return text.startswith(SECRET_PREFIX) and len(text) <= MAX_SECRET_LENGTH and text.isascii()


def load_or_create_pepper(path: Path) -> bytes:
    """The pepper in `path`, made there (mode 0600) when there is none. Every key dies with it: back it up.

    Raises PepperError when the file holds less than 32 bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _create_pepper(path)
    pepper = path.read_bytes()
    if len(pepper) < PEPPER_BYTES:
        raise PepperError(
            f"{path} holds {len(pepper)} bytes and a pepper has at least {PEPPER_BYTES}; restore it from its backup",
            "pepper_file",
        )
    return pepper


def _create_pepper(path: Path) -> None:
    """Complete before it has its name, and never in place of one that another process made meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(PEPPER_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
