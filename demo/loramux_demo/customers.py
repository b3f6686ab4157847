"""The demo's customers, who upload adapters and read their usage, and the metrics that their operator reads."""

from __future__ import annotations

import ssl
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

from loramux_demo.assets import OWNERS, adapter_folder
from loramux_demo.drive import Answer

FILES = ("adapter_config.json", "adapter_model.safetensors")
DAY_SECONDS = 86_400


@dataclass(frozen=True, order=True)
class UsageRow:
    """One tenant's usage of one model."""

    tenant: str
    model: str
    input_tokens: int
    output_tokens: int
    requests: int


@dataclass(frozen=True)
class StepSharing:
    """The highest number of distinct adapters in one step of the engine."""

    in_a_step: int
    beside_base: int
    """Counted over steps that also ran the base model."""


class Customer:
    """A client of the server with one tenant's key."""

    def __init__(self, tenant: str, url: str, key: str, verify: ssl.SSLContext | bool = True) -> None:
        self.tenant = tenant
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False, verify=verify)

    def upload_adapters(self) -> None:
        """Upload this tenant's adapters. Raises click.ClickException with the server's message."""
        for name in OWNERS[self.tenant]:
            files = {file: (file, (adapter_folder(name) / file).read_bytes()) for file in FILES}
            self._json("POST", "/v1/adapters", data={"name": name}, files=files)

    def usage(self) -> list[UsageRow]:
        """Return the usage of the last day by model."""
        totals: dict[str, Counter[str]] = {}
        page: dict[str, str] = {}
        while True:
            query = {
                "start_time": int(time.time()) - DAY_SECONDS,
                "bucket_width": "1d",
                "group_by": "model",
                **page,
            }
            answer = self._json("GET", "/v1/organization/usage/completions", params=query)
            for result in (result for bucket in answer["data"] for result in bucket["results"]):
                totals.setdefault(result["model"], Counter()).update(
                    input=result["input_tokens"], output=result["output_tokens"], requests=result["num_model_requests"]
                )
            if not answer["has_more"]:
                break
            page = {"page": answer["next_page"]}
        return rows_of(self.tenant, totals)

    def cannot_detect(self, model: str) -> bool:
        """Return True if another tenant's adapter and a missing one get the same answer."""
        other, missing = (self._refusal(name) for name in (model, "nobody/nothing"))
        return other[0] == 404 and other == (missing[0], missing[1].replace("nobody/nothing", model))

    def _refusal(self, model: str) -> tuple[int, str]:
        answer = self._http.post("/v1/completions", json={"model": model, "prompt": "Q: Who?\nA: ", "max_tokens": 1})
        return answer.status_code, answer.text

    def _json(self, method: str, path: str, **content: Any) -> Any:
        try:
            answer = self._http.request(method, path, **content)
        except httpx.TransportError as error:
            raise click.ClickException(f"{method} {path} for {self.tenant}: {error!r}") from None
        if answer.is_error:
            raise click.ClickException(f"{method} {path} for {self.tenant}: {answer.status_code} {answer.text}")
        return answer.json()


def usage_of(answers: Iterable[Answer]) -> list[UsageRow]:
    """Sum the `usage` of the responses by tenant and model."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for answer in answers:
        if answer.error is None:
            totals.setdefault((answer.call.tenant, answer.model), Counter()).update(
                input=answer.input_tokens, output=answer.output_tokens, requests=1
            )
    return sorted(row for (tenant, model), counts in totals.items() for row in rows_of(tenant, {model: counts}))


def rows_of(tenant: str, totals: dict[str, Counter[str]]) -> list[UsageRow]:
    """Return totals by model as sorted rows."""
    return sorted(
        UsageRow(tenant, model, counts["input"], counts["output"], counts["requests"])
        for model, counts in totals.items()
    )


def read_sharing(url: str) -> StepSharing:
    """Read the step sharing from the server's /metrics."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    gauges = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    return StepSharing(
        in_a_step=int(gauges["loramux_engine_max_distinct_adapters"]),
        beside_base=int(gauges["loramux_engine_max_distinct_adapters_beside_base"]),
    )
