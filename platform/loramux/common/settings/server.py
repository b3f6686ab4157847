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
"""Pattern of a server's address without a path. http is allowed only on this machine."""
_origin = re.compile(r"https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1_000_000)]

Signature = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]  # fmt: skip
"""Signature algorithms with a public key. A secret that is shared with an issuer does not prove the signer."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The API's address and its limits."""

    host: str = "127.0.0.1"
    """The listen address. 0.0.0.0 means every interface; then set tls_certificate, or put a TLS proxy in front of the
    server.
    """
    port: Port = 8000
    """The port."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that answer at the port, over one set of engines. One process carries the tokens of one core: see
    "Several workers" in the guide to deployment.
    """
    tls_certificate: str | None = None
    """A PEM file with the certificate and its chain; TLS 1.2 at least. If the files change, new connections use them
    within seconds."""
    tls_key: str | None = None
    """The PEM file with the certificate's private key."""
    internal_port: Port | None = None
    """A second port without TLS that serves /metrics, /health and /schema; the first port then answers 404 for these
    paths.
    """
    internal_host: str | None = None
    """The listen address of internal_port. Unset: `host`."""
    root_path: str = ""
    """A path, such as /llm, below which the API is served too, if a proxy does not remove it. The console is not served
    there."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser, with a key: https://app.example, or * for all."""
    ready_when: Literal["any", "all"] = "any"
    """any: /health/ready answers 200 if at least one base has an engine that serves. A base whose engines cannot be
    started is loaded again after a pause. all: /health/ready answers 200 only if every base has such an engine, and the
    server ends if a base loses its engines, so that its supervisor restarts it.
    """
    max_upload_bytes: Positive = 2 << 30
    """The largest upload."""
    lame_duck_seconds: Seconds = 1.0
    """Seconds after SIGTERM during which requests are still served and /health/ready already answers 503. Set this time
    to the time that your load balancer needs to notice the 503.
    """
    drain_seconds: Seconds = 30.0
    """Seconds after SIGTERM within which running requests must finish."""

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
    """The form and the level of the log, which goes to stderr: one line for each event and each request."""

    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, otherwise JSON."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. PUT /admin/log-level changes the level while the server runs."""


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces of requests over OpenTelemetry's OTLP (HTTP). Tracing needs the extra `otel`."""

    endpoint: str | None = None
    """The collector, such as http://127.0.0.1:4318. Unset: requests are not traced."""
    headers: dict[str, str] = {}
    """Headers for the collector."""
    service_name: str = "loramux"
    """The service's name in traces."""
    sample_ratio: Fraction = 1.0
    """Share of requests that are traced. This share applies to requests without a `traceparent`, which otherwise
    decides.
    """


class RecordsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The database, the blob store, their cache, and the pepper."""

    url: str = "sqlite:///var/loramux.sqlite3"
    """sqlite:///PATH (relative to the settings file) or postgresql://..."""
    start_seconds: Seconds = 60.0
    """Seconds for which a server or a trainer that starts waits for a database that does not answer."""
    blobs: str = "var/blobs"
    """The store of adapters' files: a folder, or s3://BUCKET/PREFIX, gs://..., az://..."""
    blob_options: dict[str, str] = {}
    """Options of obstore for the blob store, such as `endpoint` and `region`; put credentials in the environment
    instead.
    """
    cache: str = "var/cache"
    """A folder on this machine, from which the engine reads adapters."""
    cache_bytes: Positive = 64 << 30
    """Maximum size of the cache in bytes. Above this size, adapters that are not in use are removed from the cache."""
    pepper_file: str = "var/pepper"
    """The file of the secret with which keys are stored as MACs. The server creates the file at the first start, with
    mode 0600. Back it up.
    """


class SignInSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The console as a client of the issuer, at which people sign in with their browsers. Needs `console.url`.

    Register the redirect URI `<console.url>/console/oidc/callback` with the issuer.
    """

    client_id: Annotated[str, Meta(min_length=1, max_length=200)]
    """The client's id at the issuer. The issuer's ID tokens have this id in `aud`."""
    secret_file: str | None = None
    """The file with the client's secret. Unset: a public client, which PKCE alone protects."""
    scopes: tuple[Annotated[str, Meta(pattern=r"^[\x21\x23-\x5b\x5d-\x7e]+$")], ...] = ("email", "profile")
    """The scopes to request in addition to `openid`. With these scopes, ID tokens must have `identity_claim` and
    `operator_claim`.
    """
    label: Annotated[str, Meta(max_length=60)] = ""
    """The issuer's name on the button. Empty: its host."""


class IssuerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OIDC issuer whose tokens members may use; https, or http on this machine."""

    issuer: Annotated[str, Meta(pattern=r"^(https://[^/]|http://(127\.0\.0\.1|localhost|\[::1\])[:/])")]
    """The issuer exactly as in the tokens' `iss`; its discovery document is at a path below it."""
    audience: Annotated[str, Meta(min_length=1)]
    """The value that tokens must have in `aud`."""
    identity_claim: str = "sub"
    """The claim that identifies the member; `email` counts only with `email_verified`."""
    algorithms: tuple[Signature, ...] = ("RS256", "ES256")
    """The accepted signature algorithms of tokens."""
    operator_claim: str = "groups"
    """The claim that makes members of a tenant operators; its value is a text or a list of texts."""
    operators: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Values of the claim that make a member an operator; empty: no member is an operator."""
    sign_in: SignInSettings | None = None
    """The client with which members sign in to the console. Unset: this issuer's tokens are for the API only."""


class ConsoleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The web console at /console, and the life of its sessions."""

    enabled: bool = True
    """Serve the console."""
    url: Annotated[str, Meta(pattern=ORIGIN)] | None = None
    """The server's address as browsers see it, such as https://llm.example.com. Issuers send browsers back there."""
    idle_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 7200
    """Seconds without use after which a session ends."""
    session_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 43_200
    """Seconds after which a session ends, even if it is in use."""


class SinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sink: an external service that receives usage."""

    name: Name
    """The name of the sink; the sink's position in the ledger is stored under this name."""
    kind: Literal["openmeter", "stripe", "lago", "webhook"]
    """The kind of sink."""
    url: HttpUrl
    """The base address of the sink's API; for a webhook, the whole address."""
    secret_file: str
    """The file with the sink's API key, or with the webhook's secret `whsec_...`."""
    customers: dict[str, str] = {}
    """The sink's names of tenants, by tenant: Stripe's customer id, Lago's external_subscription_id."""


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
    """Days from an invoice's date until payment is due. None: no due date is printed."""
    payment_note: str = ""
    """A text below the total, such as the bank account."""
    font: str | None = None
    """A TrueType file for PDFs. None: Helvetica, which has Latin-1's letters only."""
    bill_abandoned: bool = False
    """Bill the tokens that were computed for a caller that disconnected before it could read them. Otherwise these
    tokens are waived. Abandoned tokens count against budgets in both cases.
    """

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
    """The largest number of webhooks of a tenant."""
    allow_private_addresses: bool = False
    """Allow webhooks to private addresses, and to http://. Set this only if every tenant is trusted."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=64)] = (443, 8443)
    """The allowed ports of webhooks; with `allow_private_addresses` every port is allowed."""


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times for which prompts and answers are stored. docs/privacy.md lists the stored data and their places."""

    idempotency_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 86_400
    """Seconds for which answers to requests with an Idempotency-Key are kept, encrypted. 0: such requests are refused.
    """
    file_seconds: Annotated[int, Meta(ge=3600)] = 30 * 86_400
    """Seconds after which a file is deleted, inputs and outputs of batches alike."""
    response_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = 0
    """Seconds for which responses of /v1/responses are stored, encrypted; 0 stores none. Above 0, a response is stored
    unless its request says `store: false`, as with OpenAI. OpenAI stores responses for 2592000 seconds (30 days).
    """
    responses_per_tenant: Positive = 10_000
    """Maximum number of stored responses of a tenant; above it the oldest are deleted."""
    response_bytes_per_tenant: Annotated[int, Meta(ge=32 << 20)] = 256 << 20
    """Maximum bytes of a tenant's stored responses; above it the oldest are deleted."""


FORM_BYTES = 1 << 20
"""Maximum bytes of a form in addition to its file."""


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files, and the batches that read and write them."""

    max_file_bytes: Positive = 200 << 20
    """The largest file that a client may send."""
    max_lines: Positive = 50_000
    """The largest number of lines of a batch."""
    bytes_per_tenant: Positive = 20 << 30
    """The largest total size of a tenant's files, in bytes. The limit `file_bytes` of a tier or tenant takes
    precedence."""
    unfinished_per_tenant: Positive = 50
    """The largest number of unfinished batches of a tenant."""
    max_in_flight: Positive = 64
    """The largest number of lines of batches that one server has in the engine at a time."""
    max_in_flight_per_tenant: Positive = 32
    """The largest number of lines of one tenant's batches that one server has in the engine at a time."""
    max_in_flight_beside_others: Positive = 8
    """The largest number of lines of batches that one server has in the engine while other requests run."""
    judge_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds within which a judge of evaluations must answer one call."""
    allow_private_judges: bool = False
    """Allow judges with addresses in private networks, and http://. Set this only if every tenant is trusted."""

    @property
    def max_body_bytes(self) -> int:
        """The largest body that brings a file, in bytes."""
        return self.max_file_bytes + FORM_BYTES


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fine-tuning jobs, and the trainers that run them. A trainer needs the extra `training`."""

    enabled: bool = True
    """Accept fine-tuning jobs."""
    local_trainer: bool = True
    """Start a trainer on this machine when a job waits. If false, `loramux trainer` runs them, here or elsewhere."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of `loramux trainer`: processors, or the first card that CUDA_VISIBLE_DEVICES names. The server's own
    trainer uses processors, so it never shares an engine's card.
    """
    max_examples: Positive = 50_000
    """The largest number of examples of a training file."""
    max_tokens: Positive = 50_000_000
    """The largest number of tokens that a job trains on: tokens of the examples, times epochs."""
    unfinished_per_tenant: Positive = 5
    """The largest number of unfinished jobs of a tenant."""
    unfinished_seconds: Annotated[int, Meta(ge=3600, le=365 * 86_400)] = 14 * 86_400
    """Seconds after its creation at which an unfinished job is cancelled: no trainer took it, or it stayed paused."""
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 2e-4
    """The learning rate of `learning_rate_multiplier` 1."""
    jobs: Annotated[int, Meta(ge=1, le=64)] = 1
    """The largest number of jobs that a trainer runs at a time."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Threads of each job."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the time for which the jobs of the server's own trainer compute while requests run, if the pauses
    between requests have been less. A job computes only on processors that nothing else wants. 1: a job never gives
    way."""
    memory_bytes: Positive = 32 << 30
    """The largest private memory of a job's process."""
    job_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 7 * 86_400
    """The longest time of a job's process, in seconds of processor time per thread."""
    checkpoint_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 600
    """Seconds after which a checkpoint is written within an epoch. A job whose trainer dies loses no more than that."""
    max_checkpoints: Annotated[int, Meta(ge=1, le=100)] = 3
    """The largest number of epochs of a job that become revisions, the last ones."""

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.local_trainer:
            raise ValueError(
                "training.device: the server's own trainer uses processors. Set training.local_trainer to false, and "
                "run `loramux trainer` with CUDA_VISIBLE_DEVICES set to a card without an engine"
            )
