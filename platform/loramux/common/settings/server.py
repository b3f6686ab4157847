"""The server: its address, log, records, OIDC issuers, console, sinks, invoices, webhooks, batches and retention."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=7 * 86_400)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
HttpUrl = Annotated[str, Meta(pattern=r"^https?://[^/\s]+(/\S*)?$")]
ORIGIN = r"^(https://[^/\s]+|http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?)/?$"
"""A server's address without a path; without TLS only on this machine."""
_origin = re.compile(r"https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1_000_000)]

Signature = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]  # fmt: skip
"""Algorithms with a public key: a secret that is shared with an issuer does not prove the signer."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The API's address and its limits."""

    host: str = "127.0.0.1"
    """The listen address. 0.0.0.0 is every interface; set tls_certificate, or put TLS in front of it."""
    port: Port = 8000
    """The port."""
    tls_certificate: str | None = None
    """A PEM file with the certificate and its chain; TLS 1.2 at least. Files that change are used for new
    connections within seconds."""
    tls_key: str | None = None
    """The PEM file with the certificate's private key."""
    internal_port: Port | None = None
    """A second port, without TLS, for /metrics, /health and /schema: then the first port answers 404 for them."""
    internal_host: str | None = None
    """The listen address of internal_port. Unset: `host`."""
    root_path: str = ""
    """A path below which the API is answered too, such as /llm, for a proxy that sends it along. The console is not."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser, with a key: https://app.example, or * for all."""
    ready_when: Literal["any", "all"] = "any"
    """any: /health/ready answers 200 while any base has an engine that serves, and a base whose engines cannot be
    started is loaded again after a pause. all: 200 only while every base has one, and the server ends when a base has
    lost its engines, so that its supervisor starts it again."""
    max_upload_bytes: Positive = 2 << 30
    """The largest upload."""
    lame_duck_seconds: Seconds = 1.0
    """Seconds after SIGTERM in which requests are still served while /health/ready already answers 503. Set it to the
    time in which your load balancer notices."""
    drain_seconds: Seconds = 30.0
    """Seconds that running requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError("server.root_path begins with a slash and does not end with one, such as /llm")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("server.tls_certificate and server.tls_key are set together, or neither")
        for origin in self.cors_origins:
            if origin != "*" and not _origin.fullmatch(origin):
                raise ValueError(f"server.cors_origins: '{origin}' is no origin; write https://app.example, or *")
        if self.internal_port == self.port and (self.internal_host or self.host) == self.host:
            raise ValueError("server.internal_port is another port than server.port")


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form and the level of the log, which goes to stderr: one line an event, one for each request."""

    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, JSON elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level. PUT /admin/log-level changes it while the server runs."""


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces of requests over OpenTelemetry's OTLP (HTTP). They need the extra `otel`."""

    endpoint: str | None = None
    """The collector, such as http://127.0.0.1:4318. Unset: nothing is traced."""
    headers: dict[str, str] = {}
    """Headers for the collector."""
    service_name: str = "loramux"
    """The service's name in traces."""
    sample_ratio: Fraction = 1.0
    """Share of requests that are traced where the client's `traceparent` does not decide it."""


class RecordsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The database, the blob store, their cache, and the pepper."""

    url: str = "sqlite:///var/loramux.sqlite3"
    """sqlite:///PATH (relative to the settings file) or postgresql://..."""
    blobs: str = "var/blobs"
    """The store of adapters' files: a folder, or s3://BUCKET/PREFIX, gs://..., az://..."""
    blob_options: dict[str, str] = {}
    """Options of obstore for that store, such as `endpoint` and `region`; credentials are better in the environment."""
    cache: str = "var/cache"
    """A folder on this machine, from which the engine reads adapters."""
    cache_bytes: Positive = 64 << 30
    """Above this size, contents that are not in use leave the cache."""
    pepper_file: str = "var/pepper"
    """The secret under which keys are stored as MACs; made at the first start, mode 0600. Back it up."""


class SignInSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The console as a client of the issuer: people sign in there with their browsers. Needs `console.url`.

    Register the redirect URI `<console.url>/console/oidc/callback` with the issuer.
    """

    client_id: Annotated[str, Meta(min_length=1, max_length=200)]
    """The client's id at the issuer; the ID tokens that it gives have it in `aud`."""
    secret_file: str | None = None
    """The file with the client's secret. Unset: a public client, which PKCE alone protects."""
    scopes: tuple[Annotated[str, Meta(pattern=r"^[\x21\x23-\x5b\x5d-\x7e]+$")], ...] = ("email", "profile")
    """The scopes to ask for beside `openid`: ID tokens must have `identity_claim` and `operator_claim`."""
    label: Annotated[str, Meta(max_length=60)] = ""
    """The issuer's name on the button. Empty: its host."""


class IssuerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OIDC issuer whose tokens members may use; https, or http on this machine."""

    issuer: Annotated[str, Meta(pattern=r"^(https://[^/]|http://(127\.0\.0\.1|localhost|\[::1\])[:/])")]
    """The issuer exactly as in the tokens' `iss`; its discovery document lies under it."""
    audience: Annotated[str, Meta(min_length=1)]
    """The value that tokens must have in `aud`."""
    identity_claim: str = "sub"
    """The claim that identifies the member; `email` counts only with `email_verified`."""
    algorithms: tuple[Signature, ...] = ("RS256", "ES256")
    """The accepted signature algorithms of tokens."""
    operator_claim: str = "groups"
    """The claim, a text or a list of texts, in which members of a tenant are made operators."""
    operators: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Values of the claim that make a member an operator; none: no member is one."""
    sign_in: SignInSettings | None = None
    """The client with which members sign in to the console. Unset: this issuer's tokens are for the API only."""


class ConsoleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The web console at /console, and the life of its sessions."""

    enabled: bool = True
    """Serve the console."""
    url: Annotated[str, Meta(pattern=ORIGIN)] | None = None
    """The server's address as browsers see it, such as https://llm.example.com; sign-in at an issuer returns there."""
    idle_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 7200
    """A session ends when it was not used for so long."""
    session_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 43_200
    """A session ends after so long, however much it is used."""


class SinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sink: an outside service that receives usage."""

    name: Name
    """The name of the sink; its position in the ledger is stored under it."""
    kind: Literal["openmeter", "stripe", "lago", "webhook"]
    """The kind of sink."""
    url: HttpUrl
    """The base of its API; for a webhook, the whole address."""
    secret_file: str
    """The file with its API key, or the webhook's `whsec_...`."""
    customers: dict[str, str] = {}
    """The sink's names of tenants: Stripe's customer id, Lago's external_subscription_id."""


class BillingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The seller, the tax and the look of invoices. A closed month's invoices keep the seller and tax of that time."""

    issuer: str = "loramux"
    """The seller's name."""
    address: tuple[str, ...] = ()
    """The seller's address, line by line."""
    tax_id: str | None = None
    """The seller's tax number, such as DE123456789."""
    tax_name: str = "VAT"
    """The name of the tax on invoices."""
    tax_percent: str = "0"
    """The tax on every invoice, such as "19" or "8.875"; tenants can be exempt."""
    payment_days: Annotated[int, Meta(ge=0, le=365)] | None = None
    """Days from an invoice's date until it is due. None: no due date is printed."""
    payment_note: str = ""
    """Printed below the total, such as the bank account."""
    font: str | None = None
    """A TrueType file for PDFs. None: Helvetica, which has Latin-1's letters only."""
    bill_abandoned: bool = False
    """Bill the tokens that were computed for a caller that left before it could read them. Otherwise they are waived.
    They count against budgets either way."""

    def __post_init__(self) -> None:
        try:
            percent = Decimal(self.tax_percent)
            is_valid = 0 <= percent <= 100 and percent == round(percent, 4)
        except ArithmeticError:
            is_valid = False
        if not is_valid:
            raise ValueError(
                "billing.tax_percent is 0 to 100 in quotes, with at most 4 digits behind the point, such as '19'"
            )


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tenants' own webhooks."""

    max_per_tenant: Annotated[int, Meta(ge=0)] = 10
    """The most webhooks of a tenant."""
    allow_private_addresses: bool = False
    """Let them lead into this network, and to http://: only where every tenant is trusted."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=64)] = (443, 8443)
    """The ports that they may lead to; with `allow_private_addresses` every port is allowed."""


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompts and answers at rest. docs/privacy.md says what is stored where."""

    idempotency_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 86_400
    """Seconds for which answers to requests with an Idempotency-Key are kept, encrypted; 0 refuses such requests."""
    file_seconds: Annotated[int, Meta(ge=3600)] = 30 * 86_400
    """Seconds after which a file is deleted, inputs and outputs of batches alike."""
    response_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = 0
    """Seconds for which responses of /v1/responses are stored, encrypted; 0 stores none. Above 0 they are stored unless
    a request says `store: false`, as OpenAI does. OpenAI's time is 2592000, 30 days."""
    responses_per_tenant: Positive = 10_000
    """The most stored responses of a tenant; beyond it the oldest are deleted."""
    response_bytes_per_tenant: Annotated[int, Meta(ge=32 << 20)] = 256 << 20
    """The most bytes of a tenant's stored responses; beyond it the oldest are deleted."""


FORM_BYTES = 1 << 20
"""Bytes of a form beside its file."""


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files, and the batches that read and write them."""

    max_file_bytes: Positive = 200 << 20
    """The largest file that a client may send."""
    max_lines: Positive = 50_000
    """The most lines of a batch."""
    bytes_per_tenant: Positive = 20 << 30
    """The most bytes of a tenant's files together; the limit `file_bytes` of a tier or tenant takes precedence."""
    unfinished_per_tenant: Positive = 50
    """The most unfinished batches of a tenant."""
    max_in_flight: Positive = 64
    """The most lines of batches that one server has in the engine at a time."""
    max_in_flight_per_tenant: Positive = 32
    """The most lines of one tenant's batches that one server has in the engine at a time."""
    max_in_flight_beside_others: Positive = 8
    """The most lines of batches that one server has in the engine while other requests run."""
    judge_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds that a judge of evaluations has for one answer."""
    allow_private_judges: bool = False
    """Let judges have addresses in this network, and http://: only where every tenant is trusted."""

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of a body that brings a file."""
        return self.max_file_bytes + FORM_BYTES
