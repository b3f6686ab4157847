"""Who is asking, as a type: what the tenant-scoped repositories demand."""

from __future__ import annotations

import secrets
from typing import NewType

import msgspec

TenantId = NewType("TenantId", str)
"""A *verified* tenant. Only `loramux.tenants` makes one from a key; a row's own tenant_id is already one."""


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller."""

    tenant: TenantId
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    """Some of `loramux.tenants.SCOPES`."""


def new_id(kind: str) -> str:
    """An identifier that nobody can guess: `kind_` and 96 random bits."""
    return f"{kind}_{secrets.token_hex(12)}"
