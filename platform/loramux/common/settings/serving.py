"""Settings of base models and their engines, of the scheduler, and of adapters from their upload to their memory."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from loramux.common.settings.server import Fraction, Name, Port, Positive, Share

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
LinearFormat = Literal["auto", "measure", "tiles", "panels", "onednn", "torch"]
MAX_ENGINES = 1024
"""Maximum number of engines of a base."""
Address = Annotated[str, Meta(max_length=300, pattern=r"^tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base model of a server that has only one: the short form of one entry of `[[bases]]`."""

    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    served_model_name: Name
    """The base model's name in requests."""
    dtype: Dtype = "auto"
    """Type of the weights and of the computation: auto, bfloat16, float16 or float32. auto: as saved, or float32 on a
    CPU that would emulate half precision."""
    quantization: Quantization = "none"
    """The form of the linears' weights in memory. none: the form of the checkpoint; a quantized checkpoint keeps its
    codes. int8: integers with one scale per output. nf4 and nf4-double: the formats of bitsandbytes for QLoRA;
    nf4-double also quantizes the scales.
    """
    generation_config: GenerationConfig = "auto"
    """Source of the sampling parameters that requests leave out. auto: the checkpoint's generation_config.json. none:
    the API's own defaults (temperature 1, top_p 1, all tokens, no penalty)."""
    tool_parser: ToolParser | None = None
    """The form in which the base writes calls of tools, if its chat template does not show this form. none: `tools` is
    refused.
    """
    json_white_space: WhiteSpace = "bounded"
    """White space that constrained answers may have between two tokens of JSON. bounded: one blank, or a line break and
    two blanks. free: up to 40 white-space characters.
    """


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine loop and its memory, under the field's usual names."""

    device: str = "auto"
    """auto (a GPU if there is one), cuda, cuda:N or cpu."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of ranks: processes of this machine that each hold a share of every weight and compute a share of every
    step. Use several ranks for a base that is too large for one device. On GPUs each rank has its own: `device` and
    those after it.
    """
    max_num_seqs: Positive | None = None
    """The largest number of sequences in one step. Unset: 64; 256 on a GPU that gives the engine at least 40 GB."""
    max_num_batched_tokens: Positive | None = None
    """The largest number of tokens in one step. Decoding comes first, and prefill gets the remaining tokens. Unset:
    1024; 2048 on a GPU that gives the engine at least 40 GB."""
    max_mixed_prefill_tokens: Positive | None = None
    """The largest number of prompt tokens in a step in which sequences decode: the next tokens of these sequences wait
    for the step. Unset: 256 on a CPU; 512 on a GPU. A CPU reads fewer tokens after a long context, whose attention
    counts too. A GPU leaves up to a quarter for the next step if the rows of this one then fill tiles of 128."""
    max_model_len: Annotated[int, Meta(ge=8)] | None = None
    """The largest length of a prompt with its answer, in tokens. Unset: the model's own limit."""
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Tokens in a page of KV. Unset: the least of 16, 32, 64, 128 and 256 whose pages hold the base's widest rank tile,
    because adapters are in the same pages. It is more than 16 for a base with few layers or few heads of KV."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """The form of keys and values in memory. auto: the model's dtype. fp8: eight bits (E4M3) with a scale for each
    page, layer and head. With fp8 a page has half the bytes, or a quarter if the model is in float32, and answers
    differ slightly."""
    pool_bytes: Annotated[int, Meta(ge=1)] | None = None
    """Bytes of the pool that KV and adapters share; each rank has its own pool. Unset: the share of
    gpu_memory_utilization on a GPU, or 2 GiB on a CPU.
    """
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, steps and pools of all engines of this server there. They divide it
    equally; pool_bytes gives an engine's pool another size."""
    engines_per_device: Positive | None = None
    """Number of engines that divide a GPU's memory. Unset: the engines of this server that use the device. Set it if
    several `loramux engine serve` use one GPU."""
    batch_invariant: bool = False
    """On a GPU, compute each row in one order of sums, whichever rows are in the same step: greedy and seeded answers
    then do not depend on other requests. Steps are slower (docs/gpu.md). Only for dense models that are not quantized.
    """
    prefix_cache: bool = True
    """Keep full pages of KV for later requests of the same tenant and revision that begin with the same tokens. If
    layers have states (linear attention, Mamba 2), keep states at the ends of some pages too."""
    speculation: Literal["off", "ngram", "mtp"] = "off"
    """Draft several tokens and verify them in one step, if the measured times show that this is faster. Answers do not
    change. ngram: the tokens that followed an earlier occurrence of the latest tokens. mtp: the tokens that the base's
    own head for multi-token prediction predicts, with one rank; a checkpoint without the head is refused at start.
    """
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    """The longest draft of a sequence in one step, in tokens."""
    share_base_cache_between_projects: bool = False
    """Let a tenant's projects share the cached KV of the base model, in the same way as they share the KV of an
    adapter. Tenants never share KV.
    """
    swap_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Bytes of host memory of each rank for KV and states of preempted requests, used if a copy is faster than
    computing. 0: none.
    """
    image_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Bytes of host memory for images, as the vision tower has computed them. Images of running requests stay in this
    memory, and others until it is full. For a GPU it is pinned, and an image takes the next power of two of bytes. A
    base without images takes none."""
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads of each rank of the engine. Unset: all threads of the machine, divided among the ranks."""
    linear_format: LinearFormat = "auto"
    """Format of unquantized linears on a CPU. auto: the fastest by a measurement of this machine, which takes about two
    seconds and is kept for later starts; only formats whose result for a row does not depend on other rows are
    candidates. measure: measure at each start. tiles (Intel's AMX), panels, onednn, torch: this format, even if its
    results depend on other rows; the log then says so.
    """
    step_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds that one step may take. An engine that has requests and is silent for longer is killed."""
    in_process: bool = False
    """Run the engine on a thread of the server instead of in a separate process."""


class EngineRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of a base's engines."""

    min: Annotated[int, Meta(ge=0)] = 1
    """Number of engines that always run. 0: after ten minutes without a request no engine runs until the next request.
    """
    max: Positive | None = None
    """The largest number of engines. Unset: as many as `min`, but at least one."""
    target_wait_s: Annotated[float, Meta(gt=0)] = 1.0
    """Predicted wait for a first token, in seconds, above which more engines are started, up to `max`."""
    max_wait_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that a request waits while no engine serves. Set this time above the start time of an engine."""
    devices: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ENGINES)] = ()
    """Devices of the engines, assigned in turn. Empty: all engines use `engine.device`."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ENGINES)] = ()
    """Addresses of engines that already run, on this or other machines, as `loramux engine serve` prints them. The
    server attaches to these engines, and starts no engine.
    """

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
        """The largest number of engines."""
        return max(1, self.min) if self.max is None else self.max


class BaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base models of a server with several base models, one table each. Each adapter belongs to one base."""

    name: str
    """The base model's name in requests."""
    path: str
    """A local transformers checkpoint; relative paths start at the settings file."""
    dtype: Dtype = "auto"
    """Type of the weights and of the computation, as in `[model]`."""
    quantization: Quantization = "none"
    """The form of the linears' weights in memory, as in `[model]`."""
    generation_config: GenerationConfig = "auto"
    """Source of the sampling parameters that requests leave out, as in `[model]`."""
    tool_parser: ToolParser | None = None
    """The form in which the base writes calls of tools, as in `[model]`."""
    json_white_space: WhiteSpace = "bounded"
    """White space in constrained answers, as in `[model]`."""
    former_names: tuple[str, ...] = ()
    """Earlier names of this base. Adapters that were uploaded for an earlier name are served on this base."""
    engines: EngineRange = EngineRange()
    """Numbers of engines of this base: at least `min` and at most `max` run."""
    engine: EngineSettings = EngineSettings()
    """Settings of this base's engines. Settings that this table leaves out are as in `[engine]`."""

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each engine that a server starts for this base, one for each rank on GPUs; a GPU has one name."""
        names = self.engines.devices or (self.engine.device,)
        groups = [_devices_of_ranks(name, self.engine.tensor_parallel_size) for name in names]
        return () if self.engines.addresses else tuple(groups[i % len(groups)] for i in range(self.engines.most))

    @property
    def model(self) -> ModelSettings:
        """Return the base in the form of `[model]`."""
        return ModelSettings(
            path=self.path,
            served_model_name=self.name,
            dtype=self.dtype,
            quantization=self.quantization,
            generation_config=self.generation_config,
            tool_parser=self.tool_parser,
            json_white_space=self.json_white_space,
        )


def _devices_of_ranks(device: str, size: int) -> tuple[str, ...]:
    """Return the devices of an engine whose rank 0 is on `device`."""
    kind, _, index = ("cuda:0" if device in ("auto", "cuda") else device).partition(":")
    return tuple(f"{kind}:{int(index) + rank}" for rank in range(size)) if index.isdecimal() else (kind,)


class RaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Ray cluster of `fleet.launcher = "ray"`."""

    address: str = "auto"
    """auto (the cluster of this machine), or HOST:PORT of its head."""
    namespace: Name = "loramux"
    """Servers of the same namespace share their engines."""
    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    """CPUs that Ray reserves for an engine."""
    num_gpus: Annotated[float, Meta(ge=0)] = 1.0
    """Number of GPUs that Ray gives an engine; 0 for engines on CPUs."""
    resources: dict[str, float] = {}
    """Other resources of Ray that an engine needs, by name."""
    unused_s: Annotated[float, Meta(ge=1)] = 120.0
    """Seconds without any server, after which an engine ends."""

    @property
    def engines_per_gpu(self) -> int:
        """Number of engines that Ray may place on one GPU."""
        return max(1, int(1 / self.num_gpus)) if self.num_gpus else 1

    @property
    def needs(self) -> dict[str, Any]:
        """Return the resources that Ray reserves for an engine, as options of Ray."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": self.resources}


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines in other processes and on other machines: docs/fleet.md."""

    launcher: Literal["local", "ray"] = "local"
    """local: engines are processes of this machine. ray: they are actors of a Ray cluster; needs the extra `ray`."""
    keys: str = "var/fleet"
    """The folder with the keys of the channel to `engines.addresses`, as `loramux engine keys` makes it."""
    lease_s: Annotated[float, Meta(ge=1, le=600)] = 10.0
    """Seconds of silence after which a server treats an engine as lost, or an engine a server."""
    ray: RaySettings = RaySettings()
    """The Ray cluster and the resources of an engine. The fields are described below."""


class ImageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of the images in prompts."""

    max_per_request: Annotated[int, Meta(ge=1, le=256)] = 16
    """The largest number of images of a request."""
    max_bytes: Annotated[int, Meta(ge=1, le=12 << 20)] = 8 << 20
    """The largest file of an image, in bytes."""
    max_request_bytes: Annotated[int, Meta(ge=1, le=64 << 20)] = 20 << 20
    """Maximum bytes of the files of a request's images together."""
    max_pixels: Annotated[int, Meta(ge=1, le=200_000_000)] = 25_000_000
    """The largest number of pixels of an image in its file. Decoding takes up to 32 bytes of memory a pixel."""
    max_tokens: Annotated[int, Meta(ge=4, le=16_384)] = 4096
    """The largest number of tokens of an image in a prompt. A larger image is resized to fewer pixels, as by the
    checkpoint's own limit."""
    memory_bytes: Annotated[int, Meta(ge=64 << 20)] = 1 << 30
    """Bytes of memory for images of running requests: a tenant holds at most a quarter."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 2
    """Number of images that are decoded at the same time, each in a process without rights. A tenant has at most half
    of these processes, at least one."""
    fetch_seconds: Annotated[float, Meta(gt=0, le=60)] = 10.0
    """Seconds within which all images of a request must arrive from the addresses that the request names."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=64)] = (80, 443, 8443)
    """The allowed ports of images' addresses; with `allow_private_addresses` every port is allowed."""
    allow_private_addresses: bool = False
    """Fetch images from private addresses too. Set this only if every tenant is trusted."""

    @property
    def tenant_bytes(self) -> int:
        """Bytes of memory that the images of a tenant's running requests may hold."""
        return self.memory_bytes // 4


class ClassShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of the engine by service class, while all classes have work."""

    interactive: Share = 8.0
    standard: Share = 3.0
    batch: Share = 1.0


class ClassDeadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Deadlines in milliseconds to the first token, if a request has no deadline itself. None: no deadline."""

    interactive: Positive | None = None
    standard: Positive | None = None
    batch: Positive | None = None


class ReservedPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of the pool that is reserved for a class while it holds less."""

    interactive: Fraction = 0.0
    standard: Fraction = 0.0
    batch: Fraction = 0.0

    def __post_init__(self) -> None:
        if (total := self.interactive + self.standard + self.batch) > 0.9:
            raise ValueError(f"reserved_pages sum to {total:g}; the maximum is 0.9")


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares, limits and deadlines of scheduling. docs/scheduling.md explains each."""

    class_shares: ClassShares = ClassShares()
    """Shares of the engine by service class, while all classes have work."""
    max_service_lead: Annotated[float, Meta(ge=0)] = 8192.0
    """The largest lead of a tenant over another one that waits, in units of service divided by weight."""
    max_lift: Annotated[float, Meta(ge=0)] = 131_072.0
    """The maximum service, in units divided by weight, that other tenants get before this engine admits a tenant that
    other engines of the base have served. 0: engines do not count the service of other engines.
    """
    affinity_window: Annotated[float, Meta(ge=0)] = 512.0
    """Units of service divided by weight by which a tenant may be admitted early, because its adapter is in the batch
    already."""
    adapter_overhead_target: Annotated[float, Meta(gt=0)] = 0.1
    """Bytes of the batch's adapters divided by the bytes that a step reads anyway. Above this ratio `affinity_window`
    applies."""
    reserved_pages: ReservedPages = ReservedPages()
    """Shares of the pool that are reserved for a class while it holds less."""
    tenant_guaranteed_pages: Fraction = 0.0
    """Share of the pool that a tenant can reclaim from tenants that have borrowed its pages; the share is multiplied by
    the tenant's weight.
    """
    tenant_max_pages: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the pool that one tenant may hold."""
    deadlines_ms: ClassDeadlines = ClassDeadlines()
    """Deadlines in milliseconds to the first token, by class, if a request has no deadline itself."""


class AdapterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on adapters and on their memory."""

    max_rank: Annotated[int, Meta(ge=1, le=16_384)] = 256
    """The largest rank of an adapter."""
    max_bytes: Positive = 2 << 30
    """The largest adapter, in bytes of its weights."""
    max_vocabulary_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Maximum bytes that one adapter may have for the embedding and the head: LoRA, whole matrices, trained tokens."""
    max_adapters_per_tenant: Positive = 10_000
    """The largest number of adapters of a tenant."""
    host_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Bytes of host memory for adapters. An adapter in this memory need not be read from disk when it returns to the
    pool. With a GPU this memory is pinned.
    """
    max_loading: Annotated[int, Meta(ge=1, le=64)] = 4
    """The largest number of adapters that are loaded into the pool at the same time. One tenant has at most one load
    less than this number (at least 1).
    """
    load_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Maximum seconds for reading one adapter. After this time, the requests that wait for the adapter end with an
    error.
    """
    preload: tuple[str, ...] = ()
    """Adapters that are loaded into the pool before the first request and are never evicted: `tenant/adapter`,
    `tenant/adapter@3`.
    """
    pinned_pool_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    """Share of the pool that pinned and preloaded adapters may hold."""
    local_root: str | None = None
    """A folder from which operators may load adapters with POST /v1/load_lora_adapter. None: this route is off."""
    pins_per_tenant: Annotated[int, Meta(ge=0)] = 2
    """The largest number of pinned revisions of a tenant."""
    pin_idle_seconds: Positive | None = 7 * 86_400
    """Seconds without a request after which a pin ends; None: never."""
    undo_seconds: Annotated[int, Meta(ge=0, le=365 * 86_400)] = 7 * 86_400
    """Seconds during which a deletion can be undone and its files are kept. The files are kept at least a minute,
    because running requests may need them."""
    max_revisions: Positive = 1000
    """The largest number of revisions of an adapter. People read the list, and every look-up reads the rows."""
    max_aliases: Positive = 20
    """The largest number of aliases of an adapter. Aliases are stages of a release, not a database of names."""
    max_grants: Positive = 1000
    """The largest number of tenants to which an adapter is granted."""


class BucketSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefix in an object store from which the server may fetch tenants' adapters."""

    url: Annotated[str, Meta(pattern=r"^(s3|gs|az)://[^/]+/(.*/)?$")]
    """A prefix such as `s3://bucket/imports/{tenant}/`; `{tenant}` is replaced by the caller's tenant."""
    options: dict[str, str] = {}
    """Options of obstore for this bucket, as in records.blob_options."""


class HubSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model hub, such as `https://huggingface.co`, from which the server may fetch tenants' adapters."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """The hub's name in requests."""
    url: Annotated[str, Meta(pattern=r"^https?://[^/]+$")]
    redirects: tuple[str, ...] = ()
    """Hosts to which the hub may redirect a download; every other redirect is refused."""
    networks: tuple[str, ...] = ()
    """Private networks that may contain the hub's addresses, such as `10.1.0.0/16`. All other addresses must be public.
    """
    token_file: str | None = None
    """The file with the bearer token for the hub; it is sent to no other host."""

    def __post_init__(self) -> None:
        for network in self.networks:
            ipaddress.ip_network(network)
        urlsplit(self.url).port  # noqa: B018  raises ValueError for one that is no port


class UploadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Upload sessions, and the sources from which the server fetches adapters. Without a list, the server fetches from
    no source.
    """

    session_seconds: Positive = 86_400
    """Seconds that an upload waits for its client's next bytes."""
    open_per_tenant: Positive = 32
    """The largest number of unfinished uploads of a tenant."""
    open_bytes_per_tenant: Positive = 32 << 30
    """Maximum announced bytes of a tenant's unfinished uploads."""
    buckets: tuple[BucketSettings, ...] = ()
    """Buckets from which the server may fetch adapters."""
    hubs: tuple[HubSettings, ...] = ()
    """Model hubs from which the server may fetch adapters."""


class PushSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training adapters: weights that trainers push while they train (POST /v1/load_lora_adapter)."""

    root: str | None = None
    """A folder of this machine with a folder for each tenant, named after the tenant, from which the tenant's keys with
    the scope `push` may push. Unset: trainers send the files in the body."""
    shared_memory: bool = False
    """Accept weights from POSIX shared memory of this machine. Only segments of the server's own user are read, and
    only segments that no other user may write."""
    keep: Annotated[int, Meta(ge=1, le=1000)] = 8
    """Versions of a name that are kept, and names of a series (`policy-v12`, `policy-v13`). Older ones are removed and
    cannot be restored."""
    series_per_tenant: Annotated[int, Meta(ge=0, le=1000)] = 4
    """The largest number of series of a tenant. 0: no training adapters."""
    idle_seconds: Positive = 86_400
    """Seconds after the last push of a series until the series is removed."""
    parity_interval_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds between two comparisons of a series with PEFT, which run after the push. The first version of a series is
    always compared, if validation.parity is on."""


class ValidationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resources of the processes that check uploads before they are served."""

    memory_bytes: Positive = 128 << 20
    """Bytes of memory for the check of one upload, in addition to about 45 MiB of a waiting process."""
    bundle_memory_bytes: Positive = 1 << 30
    """Bytes of memory for the check of the other files (tokenizer, template), in addition to about 250 MiB of a waiting
    process."""
    conversion_memory_bytes: Positive = 512 << 20
    """Bytes of memory for the conversion of an upload to a LoRA, in addition to about 200 MiB of a waiting process."""
    cpu_seconds: Positive = 60
    """Seconds of CPU time for one validation."""
    conversion_cpu_seconds: Positive = 240
    """Seconds of CPU time for a conversion. Only a conversion that computes with the base's weights (PiSSA) takes long.
    """
    wall_seconds: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds of elapsed time for one validation."""
    parity: bool = True
    """Compare the outputs that would be served with PEFT's outputs."""
    parity_model_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """Bases up to this size, in float32 bytes, are compared as a whole model, which takes twice as much memory."""
    parity_engine_bytes: Annotated[int, Meta(ge=0)] = 16 << 30
    """Larger bases up to this size, in float32 bytes, are compared through their engine, which answers the check's
    prompts as class batch without a bill. The answers are compared with PEFT's forward, layer by layer. 0: only linears
    are compared.
    """
    parity_engine_seconds: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds within which the engine must answer. Otherwise the report says that tokens were not compared."""
    parity_memory_bytes: Positive = 2 << 30
    """Bytes of private memory for one comparison with PEFT."""
    parity_cpu_seconds: Positive = 300
    """Seconds of CPU time for one comparison with PEFT."""
