"""Customers and their keys: the one place where a secret becomes a verified tenant.

TenantsError(code, field, message)
├── InvalidKey        the secret belongs to nobody (or no longer): 401
├── InvalidTenant     a name or a scope that cannot be
├── TenantExists      the name is taken
├── TenantNotFound
├── KeyNotFound
└── PepperError       the file with the pepper cannot be used
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loramux.records import Database, Principal, TenantId
from loramux.records.identity import new_id
from loramux.records.models import KeyRow, TenantRow
from loramux.records.names import GRAMMAR_IN_WORDS, is_name
from loramux.records.tenants import KeyRepository, TenantRepository

__all__ = [
    "CUSTOMER_SCOPES",
    "SCOPES",
    "InvalidKey",
    "InvalidTenant",
    "Key",
    "KeyNotFound",
    "PepperError",
    "Principal",
    "Tenant",
    "TenantExists",
    "TenantId",
    "TenantNotFound",
    "Tenants",
    "TenantsError",
    "load_or_create_pepper",
]

CUSTOMER_SCOPES = frozenset({"inference", "adapters", "usage"})
SCOPES = CUSTOMER_SCOPES | {"operator"}

SECRET_PREFIX = "sk-lm-"  # noqa: S105 - what every secret starts with, itself no secret
MAX_SECRET_LENGTH = 256
PEPPER_BYTES = 32


class TenantsError(Exception):
    """Base of what this module raises: a stable code, the field that is wrong, and a sentence with the way out."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidKey(TenantsError):
    """The same for a key that never was and one that was revoked."""

    code = "invalid_api_key"


class InvalidTenant(TenantsError):
    """A malformed name, or a scope that does not exist."""

    code = "invalid_value"


class TenantExists(TenantsError):
    """Names are unique."""

    code = "tenant_exists"


class TenantNotFound(TenantsError):
    """No tenant has that name."""

    code = "tenant_not_found"


class KeyNotFound(TenantsError):
    """No key has that id."""

    code = "key_not_found"


class PepperError(TenantsError):
    """The message names the file."""

    code = "pepper_unusable"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer. `created_at` in microseconds since the epoch."""

    id: TenantId
    name: str
    created_at: int


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret. Times in microseconds since the epoch."""

    id: str
    tenant: TenantId
    name: str
    scopes: frozenset[str]
    hint: str
    """The secret's last four characters."""
    created_at: int
    revoked_at: int | None


class Tenants:
    """Customers and their keys in one database; `pepper` is the key that secrets are MACed with."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper

    async def create(self, name: str) -> Tenant:
        """A new customer. Raises InvalidTenant or TenantExists."""
        if not is_name(name):
            raise InvalidTenant(f"a tenant's name is {GRAMMAR_IN_WORDS}; got {name[:80]!r}", "name")
        row = TenantRow(id=TenantId(new_id("tenant")), name=name, created_at=self._database.now())
        async with self._database.begin() as session:
            if not await TenantRepository(session).add(row):
                raise TenantExists(f"there is a tenant {name!r} already; choose another name", "name")
        return _tenant(row)

    async def list_tenants(self) -> list[Tenant]:
        """Every customer, by name."""
        async with self._database.read() as session:
            return [_tenant(row) for row in await TenantRepository(session).all()]

    async def create_key(
        self, tenant_name: str, *, name: str = "default", scopes: Iterable[str] = CUSTOMER_SCOPES
    ) -> tuple[Key, str]:
        """A new key and its secret, which is shown this once and stored nowhere.

        Raises TenantNotFound, or InvalidTenant for an unknown scope or an empty or over-long label.
        """
        granted = _scopes(scopes)
        if not 1 <= len(name) <= 128 or not name.isprintable():
            raise InvalidTenant("a key's name has 1 to 128 printable characters", "name")
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        async with self._database.begin() as session:
            tenant = await TenantRepository(session).named(tenant_name) if is_name(tenant_name) else None
            if tenant is None:
                raise TenantNotFound(f"there is no tenant {tenant_name[:80]!r}; create it first", "tenant")
            row = KeyRow(
                id=new_id("key"),
                tenant_id=tenant.id,
                name=name,
                scopes=" ".join(sorted(granted)),
                mac=self._mac(secret),
                hint=secret[-4:],
                created_at=self._database.now(),
            )
            KeyRepository(session).add(row)
        return _key(row), secret

    async def list_keys(self, tenant: TenantId) -> list[Key]:
        """The tenant's keys, revoked ones too, oldest first."""
        async with self._database.read() as session:
            return [_key(row) for row in await KeyRepository(session).of(tenant)]

    async def revoke_key(self, key_id: str) -> Key:
        """End a key, at once and for good; a second time changes nothing. Raises KeyNotFound."""
        async with self._database.begin() as session:
            row = await KeyRepository(session).revoke(key_id, self._database.now()) if is_name(key_id) else None
        if row is None:
            raise KeyNotFound(f"there is no key {key_id[:80]!r}", "key_id")
        return _key(row)

    async def authenticate(self, secret: str) -> Principal:
        """Who holds this secret. Raises InvalidKey."""
        found = None
        if secret.startswith(SECRET_PREFIX) and len(secret) <= MAX_SECRET_LENGTH and secret.isascii():
            async with self._database.read() as session:
                found = await KeyRepository(session).with_mac(self._mac(secret))
        if found is None:
            raise InvalidKey("the API key is unknown or was revoked; ask your operator for a new one", "authorization")
        key, tenant = found
        return Principal(tenant.id, tenant.name, key.id, frozenset(key.scopes.split()))

    def _mac(self, secret: str) -> bytes:
        return hmac.digest(self._pepper, secret.encode(), hashlib.sha256)


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


def _scopes(scopes: Iterable[str]) -> frozenset[str]:
    granted = frozenset(scopes)
    unknown = sorted(granted - SCOPES)
    if unknown or not granted:
        wrong = f"unknown: {', '.join(unknown)}" if unknown else "none given"
        raise InvalidTenant(f"a key has one or more of the scopes {', '.join(sorted(SCOPES))}; {wrong}", "scopes")
    return granted


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(id=row.id, name=row.name, created_at=row.created_at)


def _key(row: KeyRow) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant_id,
        name=row.name,
        scopes=frozenset(row.scopes.split()),
        hint=row.hint,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
