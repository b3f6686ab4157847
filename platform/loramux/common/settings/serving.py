"""What is served: base models with their engines, the scheduler, and adapters from their upload to their memory."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from loramux.common.settings.server import Fraction, Name, Positive, Share

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
GenerationConfig = Literal["auto", "none"]
ToolParser = Literal[
    "hermes",
    "llama3",
    "mistral",
    "mistral_args",
    "granite",
    "phi4",
    "pythonic",
    "qwen3_coder",
    "functiongemma",
    "gemma4",
    "none",
]
WhiteSpace = Literal["bounded", "free"]
Quantization = Literal["none", "int8", "nf4", "nf4-double"]
MAX_ENGINES = 1024
"""The most engines of a base."""
Address = Annotated[str, Meta(max_length=300, pattern=r"^tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base model of a server with one: the short form of one entry of `[[bases]]`."""

    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    served_model_name: Name
    """The base model's name in requests."""
    dtype: Dtype = "auto"
    """auto (as saved, or float32 on a CPU that would emulate half precision), bfloat16, float16 or float32."""
    quantization: Quantization = "none"
    """How weights of linears are held: none (as saved; a quantized checkpoint as its codes), int8 (integers with one
    scale for each output), nf4 or nf4-double (as bitsandbytes quantizes for QLoRA; double: the scales too)."""
    generation_config: GenerationConfig = "auto"
    """auto: the sampling parameters of the checkpoint's generation_config.json apply to requests that leave them out.
    none: the API's own defaults do (temperature 1, top_p 1, all tokens, no penalty)."""
    tool_parser: ToolParser | None = None
    """How the base writes calls of tools, where its chat template does not show it; none refuses `tools`."""
    json_white_space: WhiteSpace = "bounded"
    """White space that constrained answers may have between two tokens of JSON. bounded: one blank, or a line break and
    two. free: up to 40 of any."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine loop and its memory, under the field's usual names."""

    device: str = "auto"
    """auto (a GPU if there is one), cuda, cuda:N or cpu."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ranks that each hold a share of every weight and compute a share of every step: processes of this machine. For a
    base that one device cannot hold."""
    max_num_seqs: Positive = 64
    """The most sequences in one step."""
    max_num_batched_tokens: Positive = 1024
    """The most tokens in one step: decoding first, prefill fills the rest."""
    max_mixed_prefill_tokens: Positive | None = None
    """The most prompt tokens in a step in which sequences decode: their next tokens wait for it. Unset: 256 on a CPU,
    512 on a GPU."""
    max_model_len: Annotated[int, Meta(ge=8)] | None = None
    """The longest prompt and answer together. Unset: the model's own limit."""
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    """Tokens of a page."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """How keys and values are held. auto: in the model's dtype. fp8: in eight bits (E4M3) with a scale for each page,
    layer and head: pages of half the bytes, or a quarter in float32, at the cost of slightly different answers."""
    pool_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of the pool, which KV and adapters share; each rank has one. Unset: as gpu_memory_utilization says, 2 GiB
    on a CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for the weights and the pool."""
    prefix_cache: bool = True
    """Keep full pages of KV for requests of the same tenant and revision that begin with the same tokens."""
    speculation: Literal["off", "ngram"] = "off"
    """ngram: draft the tokens that followed an earlier occurrence of the latest ones, and verify several in one step,
    where that is faster by the measured times. Answers stay the same. On a CPU; on a GPU, and for models with linear
    attention, it has no effect, and the log says so at start."""
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    """The longest draft of a sequence in one step."""
    share_base_cache_between_projects: bool = False
    """Let a tenant's projects find each other's KV of the base model, as they do an adapter's. Tenants never do."""
    swap_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Host memory of each rank for KV of preempted requests, used where a copy is faster than computing. 0: none."""
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads of the engine, of each rank. Unset: all, shared among the ranks."""
    step_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds that one step may take; an engine that has requests and is silent for longer is ended."""
    in_process: bool = False
    """Run the engine on a thread of the server instead of in a process of its own."""


class EngineRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of a base's engines."""

    min: Annotated[int, Meta(ge=0)] = 1
    """Engines that are kept. 0: after ten minutes without a request there is none until one comes."""
    max: Positive | None = None
    """The most engines. Unset: as many as `min`, one at least."""
    target_wait_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds of predicted wait for a first token above which more engines are started, up to `max`."""
    max_wait_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that a request waits for an engine while none serves; set it above the time that one takes to start."""
    devices: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ENGINES)] = ()
    """Devices of the engines, one each and then again from the first. Empty: all use `engine.device`."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ENGINES)] = ()
    """Engines that run already, on this or other machines, as `loramux engine serve` prints them. The server attaches
    to them, and starts none."""

    def __post_init__(self) -> None:
        if self.addresses:
            if self.min not in (1, len(self.addresses)) or self.max is not None or self.devices:
                raise ValueError("engines.addresses are engines that run already; leave out min, max and devices")
            if len(set(self.addresses)) < len(self.addresses):
                raise ValueError("engines.addresses has an address twice")
            msgspec.structs.force_setattr(self, "min", len(self.addresses))
        if self.max is not None and self.max < self.min:
            raise ValueError(f"engines.max is {self.max}, less than engines.min, {self.min}")

    @property
    def most(self) -> int:
        """The most engines."""
        return max(1, self.min) if self.max is None else self.max


class BaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base models, one table each, where a server has several. Each adapter belongs to one of them."""

    name: str
    """The base model's name in requests."""
    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    dtype: Dtype = "auto"
    """As in `[model]`."""
    quantization: Quantization = "none"
    """As in `[model]`."""
    generation_config: GenerationConfig = "auto"
    """As in `[model]`."""
    tool_parser: ToolParser | None = None
    """As in `[model]`."""
    json_white_space: WhiteSpace = "bounded"
    """As in `[model]`."""
    former_names: tuple[str, ...] = ()
    """Names that this base had: adapters uploaded under them are served on it."""
    engines: EngineRange = EngineRange()
    """Engines of this base: `min` are kept, and at most `max` run."""
    engine: EngineSettings = EngineSettings()
    """Settings of its engines: what this table leaves out is as in `[engine]`."""

    @property
    def model(self) -> ModelSettings:
        """The base as an engine's settings name it."""
        return ModelSettings(
            path=self.path,
            served_model_name=self.name,
            dtype=self.dtype,
            quantization=self.quantization,
            generation_config=self.generation_config,
            tool_parser=self.tool_parser,
            json_white_space=self.json_white_space,
        )


class RaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Ray cluster of `fleet.launcher = "ray"`."""

    address: str = "auto"
    """auto (the cluster of this machine), or HOST:PORT of its head."""
    namespace: Name = "loramux"
    """Servers of the same namespace share their engines."""
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    """CPUs that Ray reserves for an engine."""
    num_gpus: Annotated[float, Meta(ge=0)] = 1.0
    """GPUs that Ray gives an engine; 0 for engines on CPUs."""
    resources: dict[str, float] = {}
    """Other resources of Ray that an engine needs, by name."""
    unused_s: Annotated[float, Meta(ge=1)] = 120.0
    """Seconds without any server after which an engine ends."""

    @property
    def needs(self) -> dict[str, Any]:
        """What Ray reserves for an engine, in Ray's words."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": self.resources}


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines in other processes and on other machines: docs/fleet.md."""

    launcher: Literal["local", "ray"] = "local"
    """local: engines are processes of this machine. ray: they are actors of a Ray cluster; needs the extra `ray`."""
    keys: str = "var/fleet"
    """The folder with the keys of the channel to `engines.addresses`, as `loramux engine keys` makes it."""
    lease_s: Annotated[float, Meta(ge=1, le=600)] = 10.0
    """Seconds of silence after which an engine is lost for a server, or a server for an engine."""
    ray: RaySettings = RaySettings()
    """The Ray cluster: its address, the namespace whose servers share engines, the CPUs, GPUs and other resources of an
    engine, and the seconds without any server after which an engine ends."""


class ClassShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of the engine by service class, when all of them have work."""

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
            raise ValueError(f"reserved_pages sum to {total:g}; the maximum is 0.9")


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares, bounds and deadlines of scheduling. docs/scheduling.md explains each."""

    class_shares: ClassShares = ClassShares()
    """Shares of the engine by service class, when all classes have work."""
    max_service_lead: Annotated[float, Meta(ge=0)] = 8192.0
    """Units of service over weight that a tenant may be ahead of another one that waits."""
    max_lift: Annotated[float, Meta(ge=0)] = 131_072.0
    """Units over weight that others get, at most, before a tenant that was served on other engines of the base is
    admitted here; 0: engines do not count what others serve."""
    affinity_window: Annotated[float, Meta(ge=0)] = 512.0
    """Units over weight by which a tenant may be admitted early because its adapter is in the batch already."""
    adapter_overhead_target: Annotated[float, Meta(gt=0)] = 0.1
    """Bytes of the batch's adapters over the bytes that a step reads anyway, above which `affinity_window` applies."""
    reserved_pages: ReservedPages = ReservedPages()
    """Shares of the pool that are kept for a class while it holds less."""
    tenant_guaranteed_pages: Fraction = 0.0
    """Share of the pool, times its weight, that a tenant can reclaim from tenants that have borrowed it."""
    tenant_max_pages: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the pool that one tenant may hold."""
    deadlines_ms: ClassDeadlines = ClassDeadlines()
    """Milliseconds to the first token, by class, for requests without their own deadline."""


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
