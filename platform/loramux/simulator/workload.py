"""The workload of a plan: a log of requests, or a description of the traffic."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from loramux.engine.request import AdapterRef, ServiceClass
from loramux.simulator.arrivals import LONGEST
from loramux.simulator.hardware import MODELS, Model
from loramux.simulator.scenario import Client, ScenarioError
from loramux.simulator.traffic import Arrivals, Source, draw_arrivals

Count = Annotated[int, Meta(ge=1)]


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a log: a JSON object, or a CSV row under these names. What else a line has is not looked at."""

    arrival_s: Annotated[float, Meta(ge=0)]
    prompt_tokens: Count
    output_tokens: Count
    tenant: str = "tenant"
    adapter: str = ""
    """Empty: the base model."""
    rank: Count = 16
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: Annotated[float, Meta(gt=0)] = 1.0
    max_tokens: Count | None = None
    """None: not logged; what was generated is taken as the limit."""


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A description: the clients of a scenario, without a device."""

    description: str = ""
    duration_s: Annotated[float, Meta(gt=0)]
    seed: int = 0
    clients: Annotated[tuple[Client, ...], Meta(min_length=1)]


def read_workload(path: Path) -> Arrivals:
    """Requests from a .toml description (`duration_s` and `[[clients]]`) or a .jsonl or .csv log.

    Raises ScenarioError naming the file, the line and the field.
    """
    try:
        match path.suffix:
            case ".toml":
                traffic = msgspec.convert(tomllib.loads(path.read_text()), Traffic)
                return draw_arrivals(traffic.clients, traffic.duration_s, traffic.seed)
            case ".jsonl":
                return _of_log(_lines(path, _json_rows(path), strict=True))
            case ".csv":
                return _of_log(_lines(path, _csv_rows(path), strict=False))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ScenarioError(f"workload {path}: {error}") from None
    raise ScenarioError(f"workload {path} is none of .toml (a description), .jsonl and .csv (a log of requests)")


def model_of(name_or_path: str) -> Model:
    """A model by its name, or from a transformers checkpoint's config.json (the file or its folder).

    Raises ScenarioError naming the field that is missing.
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


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ScenarioError(f"workload {path}, line {number}: {error}") from None


def _csv_rows(path: Path) -> Iterator[Any]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            yield {name: value for name, value in row.items() if value}


def _lines(path: Path, rows: Iterator[Any], *, strict: bool) -> list[LoggedRequest]:
    requests = []
    for number, row in enumerate(rows, start=1):
        try:
            requests.append(msgspec.convert(row, LoggedRequest, strict=strict))
        except msgspec.ValidationError as error:
            raise ScenarioError(f"workload {path}, request {number}: {error}") from None
    if not requests:
        raise ScenarioError(f"workload {path} has no requests")
    return requests


def _of_log(requests: list[LoggedRequest]) -> Arrivals:
    numbers: dict[Source, int] = {}
    first = min(request.arrival_s for request in requests)
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    columns = [
        (
            numbers.setdefault(_source(request), len(numbers)),
            request.prompt_tokens,
            request.output_tokens,
            max(request.output_tokens, request.max_tokens or 0),
        )
        for request in ordered
    ]
    source, prompts, outputs, most = np.array(columns, dtype=np.int64).T
    at = np.array([request.arrival_s - first for request in ordered])
    return Arrivals(list(numbers), source, at, prompts, outputs, most)


def _source(request: LoggedRequest) -> Source:
    adapter = AdapterRef(f"{request.tenant}/{request.adapter}", "") if request.adapter else None
    return Source(request.tenant, adapter, request.rank, request.service_class, request.weight, None, False)
