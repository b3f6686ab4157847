"""JSON objects of the console's sessions. Times are Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from loramux.tenants import Session
from loramux.units import SECOND
from loramux_api.schemas.strict import Body


class SignInBody(Body, forbid_unknown_fields=True):
    """One of: an API key, or the secret of a sign-in link."""

    key: str | None = None
    link: str | None = None


class ViewBody(Body, forbid_unknown_fields=True):
    """The tenant that an operator wants to look at."""

    tenant: str


class BeginBody(Body, forbid_unknown_fields=True):
    """The issuer to sign in at and, for members of several tenants, the tenant."""

    issuer: str
    tenant: str | None = None


class ProviderObject(msgspec.Struct, kw_only=True):
    """An identity provider at which members sign in."""

    object: Literal["console.provider"] = "console.provider"
    issuer: str
    label: str


class ProviderList(msgspec.Struct, kw_only=True):
    """Every identity provider at which members sign in."""

    object: Literal["list"] = "list"
    data: list[ProviderObject]


class BegunObject(msgspec.Struct, kw_only=True):
    """A sign-in that has begun: the browser goes to the identity provider's page."""

    object: Literal["console.sign_in"] = "console.sign_in"
    location: str


class SessionObject(msgspec.Struct, kw_only=True):
    """The browser's session."""

    object: Literal["console.session"] = "console.session"
    id: str
    tenant: str
    holder: str
    """The id of the key or the member that has signed in."""
    role: str | None
    """A member's."""
    scopes: list[str]
    project_id: str
    tier: str
    models: list[str] | None
    """The only models that the key may use; null: all of the tenant's."""
    viewed: list[str]
    """Tenants whose pages the operator has opened."""
    csrf_token: str
    """To be sent in the header X-CSRF-Token with every change."""
    created_at: int
    ends_at: int
    base_models: list[str]
    version: str


class LinkObject(msgspec.Struct, kw_only=True):
    """A sign-in link. It works once."""

    object: Literal["console.link"] = "console.link"
    path: str
    """Append it to the server's address."""
    ends_at: int


def session_object(session: Session, csrf_token: str, base_models: list[str], version: str) -> SessionObject:
    """Return the session as a JSON object."""
    caller = session.principal
    return SessionObject(
        id=session.id,
        tenant=caller.tenant_name,
        holder=caller.key_id,
        role=caller.role,
        scopes=sorted(caller.scopes),
        project_id=caller.project,
        tier=caller.tier,
        models=None if caller.models is None else sorted(caller.models),
        viewed=list(session.viewed),
        csrf_token=csrf_token,
        created_at=session.created_at // SECOND,
        ends_at=session.ends_at // SECOND,
        base_models=base_models,
        version=version,
    )
