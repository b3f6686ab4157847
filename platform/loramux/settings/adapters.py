"""Limits of adapters, upload sources, and the checking of uploads."""

from __future__ import annotations

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from loramux.settings.server import Positive


class AdapterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of adapters and of their memory."""

    max_rank: Annotated[int, Meta(ge=1, le=16_384)] = 256
    """The largest rank of an adapter."""
    max_bytes: Positive = 2 << 30
    """The largest adapter, in bytes of its weights."""
    max_vocabulary_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """The most bytes of one adapter for the embedding and the head: LoRA, whole matrices, trained tokens."""
    max_adapters_per_tenant: Positive = 10_000
    """The most adapters of a tenant."""
    host_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Bytes of adapters kept in the host's memory, so that one that returns to the pool is not read from disk again."""
    max_loading: Annotated[int, Meta(ge=1, le=64)] = 4
    """The most adapters that are loaded into the pool at a time."""
    load_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Seconds that reading one adapter may take; then the requests that wait for it end with an error."""
    preload: tuple[str, ...] = ()
    """Adapters that are in the pool before the first request and stay: `tenant/adapter`, `tenant/adapter@3`."""
    pinned_pool_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    """Share of the pool that pinned and preloaded adapters may hold."""
    local_root: str | None = None
    """A folder from which operators may load adapters with POST /v1/load_lora_adapter. None: this route is off."""
    pins_per_tenant: Annotated[int, Meta(ge=0)] = 2
    """The most pinned revisions of a tenant."""
    pin_idle_seconds: Positive | None = 7 * 86_400
    """Seconds without a request after which a pin ends; None: never."""
    undo_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = 7 * 86_400
    """Seconds in which a deletion can be undone and its files stay (a minute at least, for running requests)."""
    max_revisions: Positive = 1000
    """The most revisions of an adapter: people read the list, and every look-up reads the rows."""
    max_aliases: Positive = 20
    """The most aliases of an adapter: stages of a release, not a database of names."""
    max_grants: Positive = 1000
    """The most tenants to which an adapter is granted."""


class BucketSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A place in an object store from which tenants may have adapters fetched."""

    url: Annotated[str, Meta(pattern=r"^(s3|gs|az)://[^/]+/(.*/)?$")]
    """A prefix such as `s3://bucket/imports/{tenant}/`, where `{tenant}` is the caller's tenant."""
    options: dict[str, str] = {}
    """The same options as in records.blob_options."""


class HubSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model hub, such as `https://huggingface.co`, from which tenants may have adapters fetched."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """The hub's name in requests."""
    url: Annotated[str, Meta(pattern=r"^https?://[^/]+$")]
    redirects: tuple[str, ...] = ()
    """Hosts to which the hub may redirect a download; every other redirect is refused."""
    networks: tuple[str, ...] = ()
    """Private networks that the hub may be in, such as `10.1.0.0/16`; every other address must be public."""
    token_file: str | None = None
    """The file with the bearer token for the hub; it is sent to no other host."""

    def __post_init__(self) -> None:
        for network in self.networks:
            ipaddress.ip_network(network)
        urlsplit(self.url).port  # noqa: B018  raises ValueError for one that is no port


class UploadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Upload sessions, and the sources from which the server fetches adapters itself: none unless listed."""

    session_seconds: Positive = 86_400
    """Seconds that an upload waits for its client's next bytes."""
    open_per_tenant: Positive = 32
    """The most unfinished uploads of a tenant."""
    open_bytes_per_tenant: Positive = 32 << 30
    """The most announced bytes of a tenant's unfinished uploads."""
    buckets: tuple[BucketSettings, ...] = ()
    """Buckets from which the server may fetch adapters."""
    hubs: tuple[HubSettings, ...] = ()
    """Model hubs from which the server may fetch adapters."""


class ValidationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resources of the processes that check uploads before they are served."""

    memory_bytes: Positive = 128 << 20
    """Memory for one upload, beside about 45 MiB of a waiting process."""
    bundle_memory_bytes: Positive = 1 << 30
    """Memory for the files beside the weights (tokenizer, template), beside about 250 MiB of a waiting process."""
    conversion_memory_bytes: Positive = 512 << 20
    """Memory for one that is converted to a LoRA first, beside about 200 MiB of a waiting process."""
    cpu_seconds: Positive = 60
    """CPU time of one validation."""
    conversion_cpu_seconds: Positive = 240
    """CPU time of a conversion; only those that compute with the base's weights (PiSSA) take more than seconds."""
    wall_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Time of one validation."""
    parity: bool = True
    """Compare what would be served with what PEFT computes."""
    parity_model_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """Bases up to this size, in float32 bytes, are compared as a whole model, which takes twice as much memory."""
    parity_engine_bytes: Annotated[int, Meta(ge=0)] = 16 << 30
    """Larger bases up to this size, in float32 bytes, have their engine answer the check's prompts, as class batch and
    unbilled, and the answers are compared with PEFT's forward, layer by layer; 0: linears alone are compared."""
    parity_engine_seconds: Annotated[float, Meta(gt=0)] = 60.0
    """Time for the engine's answers; without them the report says that tokens were not compared."""
    parity_memory_bytes: Positive = 2 << 30
    """Private memory of one comparison with PEFT."""
    parity_cpu_seconds: Positive = 300
    """CPU time of one comparison with PEFT."""
