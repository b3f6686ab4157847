"""Who is asking, as a type: what the tenant-scoped repositories demand."""

from __future__ import annotations

import secrets
from typing import NewType

import msgspec

TenantId = NewType("TenantId", str)
"""A *verified* tenant. Only `loramux.tenants` makes one from a key; a row's own tenant_id is already one."""

ProjectId = NewType("ProjectId", str)
"""One of a verified tenant's projects, made in the same places."""


class Origin(msgspec.Struct, frozen=True):
    """From where somebody asks, for the audit log."""

    source: str = "local"
    """A network address, or `local` for who has the machine itself."""
    request_id: str = ""


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller: a key, or a member in person."""

    tenant: TenantId
    tenant_name: str
    key_id: str
    """The key, or the member who asks in person."""
    scopes: frozenset[str]
    """Some of `loramux.tenants.SCOPES`, with all that they imply."""
    project: ProjectId
    role: str | None = None
    """A member's, some `loramux.tenants.Role`; None for a key."""
    tier: str = "standard"
    service_class: str = "standard"
    weight: int = 1
    """The tenant's share within its class."""
    models: frozenset[str] | None = None
    """The only models that may be named: `tenant/adapter`, or the base's name. None: all of the tenant's."""
    origin: Origin = Origin()

    def may_use(self, model: str) -> bool:
        """Whether the key's allow-list has `model`, given as `tenant/adapter` or as the base's name."""
        return self.models is None or model in self.models


def new_id(kind: str) -> str:
    """An identifier that nobody can guess: `kind_` and 96 random bits."""
    return f"{kind}_{secrets.token_hex(12)}"
