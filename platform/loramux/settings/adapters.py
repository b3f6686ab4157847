"""What tenants may upload, from where, and how it is checked."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

from loramux.settings.ranges import Positive


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
