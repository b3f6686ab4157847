"""Where the server listens and keeps its records, whom it believes, and whom it tells."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.settings.ranges import Positive

Signature = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]  # fmt: skip
"""Those with a public key: a secret that is shared with an issuer proves nothing about who signed."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the API listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    max_upload_bytes: Positive = 2 << 30
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """How long SIGTERM waits for running streams."""


class RecordsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where rows and blobs live."""

    url: str = "sqlite:///var/loramux.sqlite3"
    """sqlite:///PATH (relative to the settings file) or postgresql://..."""
    blobs: str = "var/blobs"
    """Where adapters' files are kept: a folder, or s3://BUCKET/PREFIX, gs://..., az://..."""
    blob_options: dict[str, str] = {}
    """What obstore takes for that store, `endpoint` or `region`, say; credentials are better in the environment."""
    cache: str = "var/cache"
    """A folder on this machine, from which the engine reads them."""
    cache_bytes: Positive = 64 << 30
    """From there on, contents that are not in use leave the cache."""
    pepper_file: str = "var/pepper"
    """Secret that keys are MACed with; made on first use, mode 0600."""


class IssuerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OIDC issuer whose tokens are taken from people; https, or http on this very machine."""

    issuer: Annotated[str, Meta(pattern=r"^(https://[^/]|http://(127\.0\.0\.1|localhost|\[::1\])[:/])")]
    """Exactly as tokens have it in `iss`; its discovery document lies under it."""
    audience: Annotated[str, Meta(min_length=1)]
    """What tokens must have in `aud`."""
    identity_claim: str = "sub"
    """The claim that says who it is; `email` is taken only with `email_verified`."""
    algorithms: tuple[Signature, ...] = ("RS256", "ES256")
    operator_claim: str = "groups"
    """The claim, a text or a list of texts, in which members of a tenant are made operators."""
    operators: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """What must be in it, any of these; none: nobody is an operator in person."""


class SinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Somebody who is told what is used."""

    name: str
    """Its place in the ledger is kept under this name."""
    kind: Literal["openmeter", "stripe", "lago", "webhook"]
    url: str
    """Where its API begins; of a webhook, the whole address."""
    secret_file: str
    """Holds its API key, or the webhook's `whsec_...`."""
    customers: dict[str, str] = {}
    """What the sink calls a tenant: Stripe's customer id, Lago's external_subscription_id."""


class BillingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How invoices look."""

    issuer: str = "loramux"
    """Who sends them."""
    font: str | None = None
    """A TrueType file for PDFs. None: Helvetica, which has Latin-1's letters only."""


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tenants' own webhooks."""

    max_per_tenant: Annotated[int, Meta(ge=0)] = 10
    allow_private_addresses: bool = False
    """Let them lead into this network, and to http://: only where every tenant is trusted."""
