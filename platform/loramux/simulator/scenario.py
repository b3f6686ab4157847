"""A scenario: a device, a model, the engine's settings and the clients, read from TOML with overrides.

`load_scenario` reads a shipped scenario, or a file; `model_of` reads a model from a checkpoint's config.

A client's arrival times, lengths and choices of adapters follow the distributions of the literature (Poisson and Gamma
arrivals, log-normal lengths, Zipf popularity), drawn from seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from loramux.engine.messages import ServiceClass
from loramux.engine.scheduling.policy import Policy
from loramux.simulator.hardware import DEVICES, MODELS, Count, Device, Model, Positive, Seconds

Rng = np.random.Generator
LONGEST = 4096
"""Tokens at which the tails of the log-normal distributions are cut off."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="constant"):
    """Always `tokens`."""

    tokens: Count

    def draw(self, rng: Rng, count: int) -> np.ndarray:  # noqa: ARG002  nothing to draw
        """Return int64[count]."""
        return np.full(count, self.tokens, dtype=np.int64)


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="uniform"):
    """Every length from `low` to `high`, both included, with equal probability."""

    low: Count
    high: Count

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """Return int64[count]."""
        return rng.integers(self.low, self.high + 1, count)


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="distribution", tag="lognormal"):
    """A distribution of exp(Normal(mu, sigma)) tokens, limited at both ends."""

    mu: float
    sigma: Annotated[float, Meta(ge=0)]
    low: Count = 1
    high: Count = LONGEST

    def draw(self, rng: Rng, count: int) -> np.ndarray:
        """Return int64[count]."""
        return np.clip(rng.lognormal(self.mu, self.sigma, count).astype(np.int64), self.low, self.high)


Lengths = Constant | Uniform | LogNormal
"""A distribution of token counts, each at least 1."""


def arrival_times(rng: Rng, count: int, rate: float, cv: float) -> np.ndarray:
    """Return float64[count] seconds, the first 0: Gamma gaps of mean 1/rate with shape 1/cv^2 and scale cv^2/rate."""
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, count) if cv else np.full(count, 1 / rate)
    times: np.ndarray = np.cumsum(gaps) - gaps[0]
    return times


def with_pauses(times: np.ndarray, on_s: float, off_s: float) -> np.ndarray:
    """Return the same arrivals in bursts of `on_s` seconds with `off_s` of silence between them, float64 like
    `times`."""
    return times + np.floor(times / on_s) * off_s


def choose(rng: Rng, count: int, popularity: str, options: int) -> np.ndarray:
    """Return int64[count] of 0..options-1.

    `popularity` is `identical` (all the first), `distinct` (each another until all had a turn), `uniform` or
    `zipf:EXPONENT`.
    Raises ValueError for anything else.
    """
    kind, _, argument = popularity.partition(":")
    match kind:
        case "identical":
            return np.zeros(count, dtype=np.int64)
        case "distinct":
            return np.arange(count, dtype=np.int64) % options
        case "uniform" | "zipf":
            weights = np.arange(1, options + 1) ** -float(argument or 0.0)
            return rng.choice(options, count, p=weights / weights.sum())
    raise ValueError(f"popularity {popularity!r} is none of identical, distinct, uniform, zipf:EXPONENT")


Batching = Literal["continuous", "static"]
ROUTINGS = ("router", "residency", "random", "least-loaded")
_PRESETS: dict[str, Mapping[str, Device | Model]] = {"device": DEVICES, "model": MODELS}


class ScenarioError(ValueError):
    """A scenario, a workload or an override cannot be used; the message names the file, the field and the limit."""


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Turns over one growing context: in each, the base answers, then each adapter evaluates the answer.

    The requests of a conversation are sent one after the other. The next turn's context has all answers and new tokens.
    """

    turns: Annotated[int, Meta(ge=1, le=64)]
    turn_tokens: Lengths
    """New tokens of each turn after the first."""
    evaluation_tokens: Lengths
    """Tokens that an adapter generates in a turn."""
    invocation_tokens: Annotated[int, Meta(ge=1, le=256)] = 4
    """Tokens after the context that ask for an evaluation. An activated LoRA applies from these tokens on."""
    activated: bool = True
    """True: the adapters are activated LoRAs. False: they are plain LoRAs, which do not share the base's KV."""


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of traffic, from one tenant or shared by many alike."""

    tenant: str
    base: str = ""
    """Name of the base that answers, in a plan of several; empty: the only one."""
    tenants: Count = 1
    """Number of tenants; more than one are named `tenant-0`, `tenant-1`, ..."""
    rate: Positive
    """Requests per second of all tenants together, during activity; with `conversation`, conversations per second."""
    cv: Annotated[float, Meta(ge=0)] = 1.0
    """Coefficient of variation of the gaps (Gamma): 0 is exactly regular, 1 Poisson, more is burstier."""
    start_s: Seconds = 0.0
    requests: Count | None = None
    """Maximum number of requests, or conversations; None: all that arrive before the scenario ends."""
    on_s: Positive | None = None
    """Seconds of activity, followed by `off_s` seconds of silence, in turns; None: always active."""
    off_s: Seconds = 0.0
    prompt_tokens: Lengths
    """Tokens of a prompt, after the system prompt."""
    system_tokens: Lengths | None = None
    """Tokens of the system prompt with which all prompts of one adapter begin, or without adapters all prompts of one
    tenant; None: prompts share nothing.
    """
    output_tokens: Lengths
    max_tokens: Count | None = None
    """The max_tokens of the client's requests; None: exactly the number of tokens that they will generate."""
    adapters: Annotated[int, Meta(ge=0)] = 0
    """Number of adapters; 0: the base model. Adapter i belongs to the client's tenant i modulo tenants."""
    popularity: str = "uniform"
    """Popularity of the adapters, or without adapters of the tenants: identical, distinct, uniform or zipf:EXPONENT."""
    lifetime_s: Positive | None = None
    """Mean seconds for which an adapter keeps its popularity; then a new adapter takes its place. None: for ever."""
    ranks: tuple[Count, ...] = (16,)
    """Adapter i has rank ranks[i modulo their number]."""
    preload: bool = False
    """True if the client's adapters are in the pool before the first request."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: Positive = 1.0
    deadline_s: Positive | None = None
    """Deadline in seconds of the first token of the client's requests; None: no deadline."""
    conversation: Conversation | None = None
    """The conversation that each arrival begins, with the base and all of the client's adapters; None: an arrival is a
    single request. `prompt_tokens` is then the context of the first turn, `output_tokens` an answer of the base, and
    `popularity` that of the tenants.
    """

    def __post_init__(self) -> None:
        if self.conversation is not None and not self.adapters:
            raise ValueError("a conversation needs adapters that evaluate; set adapters to 1 or more")
        if self.conversation is not None and self.lifetime_s is not None:
            raise ValueError("a conversation has the same adapters from beginning to end; leave out lifetime_s")


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's death. The engine's requests continue on other engines, from the prompt and the tokens that clients
    have.
    """

    engine: str
    at_s: Seconds
    back_s: Seconds
    """Time at which the engine is ready again, with an empty pool."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One whole simulation: the same scenario gives the same figures on every machine."""

    description: str = ""
    seed: int = 0
    duration_s: Positive
    """Seconds for which requests arrive; all of them are served to their ends."""
    warmup_s: Seconds = 0.0
    """Seconds at the beginning whose requests are in no time and no count of requests."""
    device: Device
    """A table with a `preset` and the fields that differ from it, or with all fields."""
    model: Model
    """A table with a `preset` and the fields that differ from it, or with all fields."""
    engines: Count = 1
    """Engines that share the traffic, `engine-0` and so on, each with a separate device."""
    routing: str = "router"
    """`router` as in the fleet; for comparison `random`, `least-loaded` (the engine with the fewest requests), or
    `residency` (homes by hash and number of requests)."""
    fronts: Count = 1
    """Number of routers (servers), each with a part of the requests."""
    statistics_s: Positive = 1.0
    """Seconds between two reports of a busy engine to the servers."""
    exchange_s: Seconds = 0.25
    """Seconds between two exchanges of service between the engines; 0: none."""
    slowness: Mapping[str, Positive] = {}
    """Factor on the time of a step, by engine."""
    losses: tuple[Loss, ...] = ()
    """Engines that die, and come back empty."""
    pool_tokens: Count | None = None
    """Tokens of KV that the pool could hold; None: the part of `memory_utilization` that the weights leave."""
    memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    swap_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Bytes of the host's memory for KV of preempted requests."""
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    max_mixed_prefill_tokens: Count | None = None
    """Maximum number of prompt tokens in a step in which sequences decode, on a CPU fewer after a long context; None:
    only the other limits apply."""
    policy: Policy = Policy()
    """The engine's policy, with the values that differ."""
    batching: Batching = "continuous"
    """`continuous` as in the engine; for comparison `static`: requests wait until all of a batch have ended."""
    order: str = "fair"
    """`fair` as in the engine; for comparison `fifo`: by arrival alone."""
    clients: Annotated[tuple[Client, ...], Meta(min_length=1)]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        if self.pool_tokens is not None:
            return max(1, self.pool_tokens // self.block_size)
        free = self.device.memory_bytes * self.memory_utilization - self.model.weight_bytes
        return int(free // self.page_bytes)

    @property
    def token_context(self) -> float:
        """Tokens of context whose attention counts as a token; inf on a GPU, whose engine does not count attention."""
        return self.model.token_context if self.device.is_shared_by_ranks else math.inf

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's KV."""
        return self.model.kv_bytes_per_token * self.block_size


def configs_folder() -> Path:
    """Return `loramux/configs` of an installed wheel, or `configs` of the repository."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def scenarios_folder() -> Path:
    """Return the folder with the shipped scenarios."""
    return configs_folder() / "scenarios"


def scenario_names() -> list[str]:
    """Return the names of the scenarios that are shipped."""
    return sorted(path.stem for path in scenarios_folder().glob("*.toml"))


def load_scenario(
    name_or_path: str, overrides: Iterable[str] = (), devices: Mapping[str, Any] | None = None
) -> Scenario:
    """Return a shipped scenario by its name, or the scenario of a TOML file, with `key=value` overrides.

    `devices`: device and model, as plain data, that replace those of the file. Raises ScenarioError, which names the
    fault and the valid values.
    """
    shipped = scenarios_folder() / f"{name_or_path}.toml"
    path = shipped if shipped.is_file() else Path(name_or_path)
    try:
        data = tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        names = ", ".join(scenario_names())
        raise ScenarioError(f"no scenario {name_or_path!r}: give a TOML file or one of {names}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} is not valid TOML: {error}") from None
    return scenario_of({**data, **(devices or {})}, str(path), overrides)


def scenario_of(data: dict[str, Any], source: str, overrides: Iterable[str]) -> Scenario:
    """Return the scenario of plain data with overrides, which change `data`. Raises ScenarioError."""
    for override in overrides:
        _override(data, override)
    return make_scenario(data, source)


def make_scenario(data: Mapping[str, Any], source: str) -> Scenario:
    """Return the scenario of plain data, presets filled in; `source` is for messages."""
    filled = {**data, **{key: _preset(key, data[key], source) for key in _PRESETS if key in data}}
    known = {field.name for field in dataclasses.fields(Policy)}
    for name in set(data.get("policy", ())) - known:
        raise ScenarioError(f"{source}: policy has no {name!r}; it has {', '.join(sorted(known))}")
    try:
        scenario = msgspec.convert(filled, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {error}") from None
    if scenario.order not in ("fair", "fifo"):
        raise ScenarioError(f"{source}: order is {scenario.order!r}; it is fair or fifo")
    if scenario.routing not in ROUTINGS:
        raise ScenarioError(f"{source}: routing is {scenario.routing!r}; it is one of {', '.join(ROUTINGS)}")
    if scenario.order == "fifo" and scenario.engines > 1:
        raise ScenarioError(f'{source}: order = "fifo" compares tenants on one engine; set engines = 1')
    names = {f"engine-{number}" for number in range(scenario.engines)}
    if unknown := {*scenario.slowness, *(loss.engine for loss in scenario.losses)} - names:
        raise ScenarioError(f"{source}: {min(unknown)!r} is none of engine-0 to engine-{scenario.engines - 1}")
    if scenario.num_pages < 1:
        raise ScenarioError(f"{source}: the model does not fit the device; raise memory_utilization or pool_tokens")
    return scenario


def model_of(name_or_path: str) -> Model:
    """Return a model by its name, or from a transformers checkpoint's config.json (the file or its folder).

    Raises ScenarioError, which names the field that is missing.
    """
    if preset := MODELS.get(name_or_path):
        return preset
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ScenarioError(f"model {name_or_path!r} is none of {', '.join(MODELS)}, and no config: {error}") from None
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    fields = {field: config[field] for field in Model.__struct_fields__ if config.get(field) is not None}
    fields["bytes_per_element"] = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    fields["max_model_len"] = config.get("max_position_embeddings") or LONGEST
    try:
        return msgspec.convert(fields, Model)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{path}: {error}") from None


def _preset(key: str, table: Any, source: str) -> Any:
    """Return `table` over the preset that it names; a bare name means the preset itself."""
    if isinstance(table, str):
        table = {"preset": table}
    if not isinstance(table, dict) or "preset" not in table:
        return table
    presets, name = _PRESETS[key], table["preset"]
    if name not in presets:
        raise ScenarioError(f"{source}: {key}.preset {name!r} is none of {', '.join(presets)}")
    return msgspec.to_builtins(presets[name]) | {field: value for field, value in table.items() if field != "preset"}


def _override(data: dict[str, Any], override: str) -> None:
    """Set one value in place: `pool_tokens=1000000`, `clients.0.rate=3`, `device.preset=h100`."""
    key, separator, text = override.partition("=")
    if not separator:
        raise ScenarioError(f"override {override!r} has no '='; write for example pool_tokens=1000000")
    *parents, last = key.strip().split(".")
    place: Any = data
    for parent in parents:
        place = _step_into(place, parent, override)
    if isinstance(place, list):
        place[_index(place, last, override)] = _value(text)
    elif isinstance(place, dict):
        place[last] = _value(text)
    else:
        raise ScenarioError(f"override {override!r}: {'.'.join(parents)} has no fields")


def _step_into(place: Any, name: str, override: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, name, override)]
    if not isinstance(place, dict):
        raise ScenarioError(f"override {override!r}: {name!r} is not inside a table")
    if name in _PRESETS and isinstance(place.get(name), str):
        place[name] = {"preset": place[name]}
    return place.setdefault(name, {})


def _index(items: list[Any], text: str, override: str) -> int:
    if not (text.isdecimal() and int(text) < len(items)):
        raise ScenarioError(f"override {override!r}: {text!r} is no index from 0 to {len(items) - 1}")
    return int(text)


def _value(text: str) -> Any:
    """Return the value of JSON; other text is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
