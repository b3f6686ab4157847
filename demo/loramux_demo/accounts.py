"""What a customer does beside asking: uploads adapters and reads the bill; and what an operator reads."""

from __future__ import annotations

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
A_DAY = 86_400


@dataclass(frozen=True, order=True)
class UsageRow:
    """What one tenant used of one model."""

    tenant: str
    model: str
    input_tokens: int
    output_tokens: int
    requests: int


@dataclass(frozen=True)
class Sharing:
    """The most distinct adapters that any step of the engine has held."""

    in_a_step: int
    beside_base: int
    """In a step that also ran the base model."""


class Customer:
    """One tenant's view of the server."""

    def __init__(self, tenant: str, url: str, key: str) -> None:
        self.tenant = tenant
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)

    def upload_adapters(self) -> None:
        """Upload every adapter that is this tenant's; raises click.ClickException with the server's own words."""
        for name in OWNERS[self.tenant]:
            files = {file: (file, (adapter_folder(name) / file).read_bytes()) for file in FILES}
            self._json("POST", "/v1/adapters", data={"name": name}, files=files)

    def usage(self) -> list[UsageRow]:
        """The bill of the last day by model, summed over its buckets."""
        totals: dict[str, Counter[str]] = {}
        page: dict[str, str] = {}
        while True:
            query = {"start_time": int(time.time()) - A_DAY, "bucket_width": "1d", "group_by": "model", **page}
            answer = self._json("GET", "/v1/organization/usage/completions", params=query)
            for result in (result for bucket in answer["data"] for result in bucket["results"]):
                totals.setdefault(result["model"], Counter()).update(
                    input=result["input_tokens"], output=result["output_tokens"], requests=result["num_model_requests"]
                )
            if not answer["has_more"]:
                break
            page = {"page": answer["next_page"]}
        return rows_of(self.tenant, totals)

    def is_told_nothing_of(self, model: str) -> bool:
        """Whether the server answers about another tenant's adapter as about one that never was."""
        theirs, nobodys = (self._refusal(name) for name in (model, "nobody/nothing"))
        return theirs[0] == 404 and theirs == (nobodys[0], nobodys[1].replace("nobody/nothing", model))

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
    """The same bill, from the `usage` of the responses alone."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for answer in answers:
        if answer.error is None:
            totals.setdefault((answer.call.tenant, answer.model), Counter()).update(
                input=answer.input_tokens, output=answer.output_tokens, requests=1
            )
    return sorted(row for (tenant, model), counts in totals.items() for row in rows_of(tenant, {model: counts}))


def rows_of(tenant: str, totals: dict[str, Counter[str]]) -> list[UsageRow]:
    """Totals by model as rows, sorted."""
    return sorted(
        UsageRow(tenant, model, counts["input"], counts["output"], counts["requests"])
        for model, counts in totals.items()
    )


def read_sharing(url: str) -> Sharing:
    """From the server's own /metrics."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    gauges = {family.name: family.samples[0].value for family in text_string_to_metric_families(text) if family.samples}
    return Sharing(
        in_a_step=int(gauges["loramux_engine_max_distinct_adapters"]),
        beside_base=int(gauges["loramux_engine_max_distinct_adapters_beside_base"]),
    )
