"""A log of requests as a description of traffic: rates, bursts, lengths, adapters and their popularity.

A description is drawn anew with every seed, scales by its rates, and says nothing of single requests. Requests to the
base model and to adapters, of each base and class, become a client each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loramux.simulator.scenario import Client, LogNormal
from loramux.simulator.traffic import LoggedRequest, Traffic

MOST_RANKS = 64
"""Maximum number of ranks that a client lists; adapters beyond have them in turn."""
MOST_EXPONENT = 3.0
LEAST_SECONDS = 1.0


def describe_log(log: Sequence[LoggedRequest], description: str = "") -> Traffic:
    """Return a description of the log's traffic. `log` has at least one request."""
    groups: dict[tuple[str, str, bool], list[LoggedRequest]] = {}
    for request in sorted(log, key=lambda one: one.arrival_s):
        groups.setdefault((request.base, request.service_class, bool(request.adapter)), []).append(request)
    first = min(request.arrival_s for request in log)
    duration = max(LEAST_SECONDS, max(request.arrival_s for request in log) - first)
    clients = [_client(f"usage-{number}", group, duration) for number, group in enumerate(groups.values())]
    return Traffic(description=description, duration_s=round(duration, 3), clients=tuple(clients))


def _client(name: str, requests: Sequence[LoggedRequest], duration: float) -> Client:
    adapters = Counter(request.adapter for request in requests if request.adapter)
    ranks = {request.adapter: request.rank for request in requests}
    return Client(
        tenant=name,
        base=requests[0].base,
        tenants=len({request.tenant for request in requests}),
        rate=len(requests) / duration,
        cv=_burstiness([request.arrival_s for request in requests]),
        prompt_tokens=_lengths([request.prompt_tokens for request in requests]),
        output_tokens=_lengths([request.output_tokens for request in requests]),
        adapters=len(adapters),
        popularity=f"zipf:{_exponent([count for _, count in adapters.most_common()])}" if adapters else "uniform",
        ranks=tuple(ranks[adapter] for adapter, _ in adapters.most_common(MOST_RANKS)) or (16,),
        service_class=requests[0].service_class,
    )


def _burstiness(times: Sequence[float]) -> float:
    """Return the coefficient of variation of the gaps; 1 if there are too few."""
    gaps = np.diff(times)
    return round(float(gaps.std() / gaps.mean()), 3) if len(gaps) > 1 and gaps.mean() > 0 else 1.0


def _lengths(tokens: Sequence[int]) -> LogNormal:
    logs = np.log(tokens)
    return LogNormal(round(float(logs.mean()), 4), round(float(logs.std()), 4), min(tokens), max(tokens))


def _exponent(counts: Sequence[int]) -> float:
    """Return the most likely exponent s of a Zipf law, count ~ rank^-s. `counts` fall."""
    if len(counts) < 2:
        return 0.0
    logs, shares = np.log(np.arange(1, len(counts) + 1)), np.array(counts) / sum(counts)
    exponents = np.linspace(0.0, MOST_EXPONENT, 301)
    likelihoods = [-s * float(shares @ logs) - math.log(float(np.exp(-s * logs).sum())) for s in exponents]
    return round(float(exponents[int(np.argmax(likelihoods))]), 2)


def traffic_as_toml(traffic: Traffic) -> str:
    """Return the description as a TOML file."""
    fields = msgspec.to_builtins(traffic)
    clients = fields.pop("clients")
    lines = [f"{name} = {_value(value)}" for name, value in fields.items()]
    for client in clients:
        lines += [
            "",
            "[[clients]]",
            *(f"{name} = {_value(value)}" for name, value in client.items() if value is not None),
        ]
    return "\n".join([*lines, ""])


def _value(value: Any) -> str:
    """Return a value as in TOML: strings, numbers and lists are as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=True)
