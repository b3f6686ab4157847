"""Every setting, read once from one TOML file, checked, and frozen."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1_000_000)]
Signature = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]  # fmt: skip
"""Those with a public key: a secret that is shared with an issuer proves nothing about who signed."""


class SettingsError(ValueError):
    """A setting is missing or out of range; the message names the file, the field and the limit."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the API listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    max_upload_bytes: Positive = 2 << 30
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """How long SIGTERM waits for running streams."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The one base model."""

    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    served_model_name: str
    dtype: str = "auto"
    """auto (as saved), bfloat16, float16 or float32."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The loop and its memory; the names are the field's usual ones."""

    device: str = "auto"
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 1024
    max_model_len: Annotated[int, Meta(ge=8)] | None = None
    """None: as the model's config says."""
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    pool_bytes: Annotated[int, Meta(ge=1)] | None = None
    """The one pool for KV and adapters. None: gpu_memory_utilization of the device, or 2 GiB on a CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    prefix_cache: bool = True
    """Keep full pages of KV for requests of the same tenant and revision that begin with the same tokens."""
    share_base_cache_between_projects: bool = False
    """Let a tenant's projects find each other's KV of the base model, as they do an adapter's. Tenants never do."""
    swap_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Of the host's memory, for KV of preempted requests: it goes there where that is quicker than computing it again.
    0: never."""
    num_threads: Positive | None = None
    in_process: bool = False
    """Run the engine on a thread of the server instead of in a process of its own."""


class ClassShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the service classes divide the engine when all of them have work."""

    interactive: Share = 8.0
    standard: Share = 3.0
    batch: Share = 1.0


class ClassDeadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Milliseconds to the first token, for requests that bring no deadline of their own; None: as long as it takes."""

    interactive: Positive | None = None
    standard: Positive | None = None
    batch: Positive | None = None


class ReservedPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of the pool that is kept for a class while it holds less."""

    interactive: Fraction = 0.0
    standard: Fraction = 0.0
    batch: Fraction = 0.0

    def __post_init__(self) -> None:
        if (total := self.interactive + self.standard + self.batch) > 0.9:
            raise ValueError(f"reserved_pages add up to {total:g}, and may to 0.9: the rest serves everybody")


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who gets how much, and when the answer is no. docs/scheduling.md explains each."""

    class_shares: ClassShares = ClassShares()
    tau: Annotated[float, Meta(ge=0)] = 8192.0
    """Units of service over weight that a tenant may be ahead of another one who waits."""
    quantum: Annotated[float, Meta(ge=0)] = 512.0
    """Units over weight by which a tenant may be admitted early because its adapter is in the batch already."""
    overhead_target: Annotated[float, Meta(gt=0)] = 0.1
    """From which slow-down by the adapters in the batch on `quantum` counts."""
    reserved_pages: ReservedPages = ReservedPages()
    tenant_guaranteed_pages: Fraction = 0.0
    """Share of the pool, times the tenant's weight, that it gets back from those who have borrowed it."""
    tenant_max_pages: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the pool that one tenant may hold."""
    deadlines_ms: ClassDeadlines = ClassDeadlines()


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


class AdapterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tenant may upload."""

    max_rank: Positive = 256
    max_bytes: Positive = 2 << 30
    max_vocabulary_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Of what one adapter brings for the embedding and the head: LoRA on them, whole matrices, trained tokens."""
    max_adapters_per_tenant: Positive = 10_000
    host_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Adapters kept in the host's memory, so that one that comes back into the pool is not read from disk again."""
    max_loading: Annotated[int, Meta(ge=1, le=64)] = 4
    """Adapters on their way into the pool at a time."""
    preload: tuple[str, ...] = ()
    """Adapters that are in the pool before the first request and stay: `tenant/adapter`, `tenant/adapter@3`."""
    pinned_pool_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    """Share of the pool that pinned and preloaded adapters may hold."""
    local_root: str | None = None
    """A folder: operators may load adapters from below it with POST /v1/load_lora_adapter. None: nobody may."""
    pins_per_tenant: Annotated[int, Meta(ge=0)] = 2
    pin_idle_seconds: Positive | None = 7 * 86_400
    """A pin is let go when nothing has asked for its revision for so long; None: never."""
    undo_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = 7 * 86_400
    """How long a deletion can be undone; so long its files stay (a minute at least, for requests on their way)."""
    max_revisions: Positive = 1000
    """Of an adapter: a list that people read, and rows that every look at the adapter reads."""
    max_aliases: Positive = 20
    """Of an adapter: stages of a release, not a database of names."""
    max_grants: Positive = 1000
    """Of an adapter: other tenants that may call it."""


class BucketSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A place in an object store from which tenants may have adapters fetched."""

    url: Annotated[str, Meta(pattern=r"^(s3|gs|az)://[^/]+/(.*/)?$")]
    """Everything under it, `s3://bucket/imports/{tenant}/`, say; `{tenant}` is the asking tenant's name."""
    options: dict[str, str] = {}
    """As records.blob_options."""


class HubSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model hub from which tenants may have adapters fetched, `https://huggingface.co`, say."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """What callers name it by."""
    url: Annotated[str, Meta(pattern=r"^https?://[^/]+$")]
    redirects: tuple[str, ...] = ()
    """Hosts to which it may send us on for a file; every other redirect is refused."""
    networks: tuple[str, ...] = ()
    """Private networks in which it may be, `10.1.0.0/16`, say; every other address must be public."""
    token_file: str | None = None
    """Holds what is sent to the hub itself, and to no other host, as a bearer token."""

    def __post_init__(self) -> None:
        for network in self.networks:
            ipaddress.ip_network(network)


class UploadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Upload sessions, and from where the server fetches adapters by itself: from nowhere unless it is listed."""

    session_seconds: Positive = 86_400
    """How long a session waits for its client's next bytes."""
    open_per_tenant: Positive = 32
    open_bytes_per_tenant: Positive = 32 << 30
    """Announced bytes of the uploads that are open at a time."""
    buckets: tuple[BucketSettings, ...] = ()
    hubs: tuple[HubSettings, ...] = ()


class ValidationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the processes may use that check uploads before anything serves them."""

    memory_bytes: Positive = 128 << 20
    """For one upload, beside some 45 MiB that a waiting process holds."""
    conversion_memory_bytes: Positive = 512 << 20
    """For one that becomes a LoRA first, beside some 200 MiB of a process that waits once there was one."""
    cpu_seconds: Positive = 60
    wall_seconds: Annotated[float, Meta(gt=0)] = 300.0
    parity: bool = True
    """Compare what would be served with what PEFT computes; the report says so where PEFT is not installed."""
    parity_model_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """A base of up to so many bytes of float32 weights is run whole, and is then in memory twice more."""
    parity_memory_bytes: Positive = 2 << 30
    parity_cpu_seconds: Positive = 300


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


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    model: ModelSettings
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    records: RecordsSettings = RecordsSettings()
    adapters: AdapterLimits = AdapterLimits()
    validation: ValidationSettings = ValidationSettings()
    uploads: UploadSettings = UploadSettings()
    issuers: tuple[IssuerSettings, ...] = ()
    """People's; keys need none."""
    sinks: tuple[SinkSettings, ...] = ()
    billing: BillingSettings = BillingSettings()
    webhooks: WebhookSettings = WebhookSettings()


def load_settings(path: Path) -> Settings:
    """Read and check a settings file; relative paths in it come back absolute.

    Raises SettingsError naming the file and the field.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"settings file {path} does not exist; start from one in configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    try:
        settings = msgspec.convert(data, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {error}") from None
    return resolve_paths(settings, path.resolve().parent)


def resolve_paths(settings: Settings, root: Path) -> Settings:
    """The same settings with every relative path made absolute, starting at `root`."""

    def at(value: str) -> str:
        return os.path.normpath(root / Path(value).expanduser())

    url, root_of_adapters = settings.records.url, settings.adapters.local_root
    if url.startswith("sqlite:///"):
        url = "sqlite:///" + at(url.removeprefix("sqlite:///"))
    font = settings.billing.font
    return msgspec.structs.replace(
        settings,
        billing=msgspec.structs.replace(settings.billing, font=font and at(font)),
        uploads=msgspec.structs.replace(
            settings.uploads,
            hubs=tuple(
                msgspec.structs.replace(hub, token_file=hub.token_file and at(hub.token_file))
                for hub in settings.uploads.hubs
            ),
        ),
        sinks=tuple(msgspec.structs.replace(sink, secret_file=at(sink.secret_file)) for sink in settings.sinks),
        adapters=msgspec.structs.replace(settings.adapters, local_root=root_of_adapters and at(root_of_adapters)),
        model=msgspec.structs.replace(settings.model, path=at(settings.model.path)),
        records=msgspec.structs.replace(
            settings.records,
            url=url,
            blobs=settings.records.blobs if "://" in settings.records.blobs else at(settings.records.blobs),
            cache=at(settings.records.cache),
            pepper_file=at(settings.records.pepper_file),
        ),
    )
