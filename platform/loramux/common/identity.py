"""Verified identities as types, and the grammar of names. Repositories of one tenant take these types."""

from __future__ import annotations

import re
import secrets
from typing import NewType

import msgspec

TenantId = NewType("TenantId", str)
"""Id of a *verified* tenant. Only `loramux.accounts.tenants` creates this id from a key. A row's `tenant_id` is a
verified id too.
"""

ProjectId = NewType("ProjectId", str)
"""Id of a project of a verified tenant, which is created in the same places as `TenantId`."""


class Origin(msgspec.Struct, frozen=True):
    """The network address and the request id of a caller, as the audit log has them."""

    source: str = "local"
    """A network address, or `local` for commands on the server's own machine."""
    request_id: str = ""


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller: a key or a member."""

    tenant: TenantId
    tenant_name: str
    key_id: str
    """The id of the API key, or of the member that a token of an identity provider names."""
    scopes: frozenset[str]
    """The caller's scopes, from `loramux.accounts.tenants.SCOPES`, with all that they imply."""
    project: ProjectId
    role: str | None = None
    """A member's `loramux.accounts.tenants.Role`; None for a key."""
    tier: str = "standard"
    service_class: str = "standard"
    weight: int = 1
    """The tenant's share within its class."""
    service_tiers: frozenset[str] = frozenset()
    """The service tiers that the caller's requests may name, in addition to `default`."""
    zero_retention: bool = False
    """True: no prompt and no answer of the caller's requests is stored."""
    models: frozenset[str] | None = None
    """The only models that the caller's requests may name, as `tenant/adapter` or the base's name. None: all models of
    the tenant.
    """
    origin: Origin = Origin()
    expires_at: int | None = None
    """The key's expiry in microseconds since the epoch. None: the key never expires, or the caller is a member."""
    lineage: tuple[str, ...] = ()
    """The key and its makers, or the member: limits on any of these count this caller's requests."""

    @property
    def owner(self) -> str:
        """Id of the caller as the owner of the objects that it creates. A rotation passes this id to the new key."""
        return self.lineage[0] if self.lineage else self.key_id

    @property
    def bound_project(self) -> ProjectId | None:
        """The only project that a key without the scope `projects` sees and manages; None: all projects."""
        is_bound = self.role is None and self.project and "projects" not in self.scopes
        return self.project if is_bound else None

    def may_use(self, model: str) -> bool:
        """Return whether the key's allow-list has `model`, which is `tenant/adapter` or the base's name."""
        return self.models is None or model in self.models

    def own_adapters(self) -> list[str] | None:
        """Return the own names of the tenant's adapters in the key's allow-list; None: all adapters."""
        if self.models is None:
            return None
        own = f"{self.tenant_name}/"
        return [model.removeprefix(own) for model in self.models if model.startswith(own)]


def new_id(kind: str) -> str:
    """Return an identifier that cannot be guessed: `kind_` and 96 random bits."""
    return f"{kind}_{secrets.token_hex(12)}"


GRAMMAR = "[a-z0-9][a-z0-9._-]{0,62}"
GRAMMAR_IN_WORDS = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"

_name = re.compile(GRAMMAR)


def is_name(text: str) -> bool:
    """Return whether `text` is a well-formed name."""
    return _name.fullmatch(text) is not None
