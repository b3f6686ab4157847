"""Run the demo on a running server: customers upload adapters, send requests and read their usage; the report has the
results.

`tour` runs all steps and returns a `Report`: answers, adapters for each step, usage, isolation. The report's `failures`
are the promises that were not kept. `show` prints the report on the terminal.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux_demo.assets import OWNERS, TOOLS, adapter_folder, load_prompts
from loramux_demo.drive import Answer, Drive, drive, first_of_each_model, plan_calls

FILES = ("adapter_config.json", "adapter_model.safetensors")
DAY_SECONDS = 86_400

MIN_EXACT = 0.9
MIN_SHARED = 5
"""Minimum number of adapters that must share one step with the base. The sixth may come a moment later on a busy
machine.
"""
MAX_CROWDS = 4
"""Maximum number of times that all requests are sent, until that many adapters shared a step."""
QUESTIONS_SHOWN = 3
WRONG_SHOWN = 10
MODELS = 1 + sum(map(len, OWNERS.values()))


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
    """Highest number of adapters in a step that also ran the base model."""


@dataclass(frozen=True)
class Report:
    """The results of one run."""

    url: str
    drive: Drive
    sharing: StepSharing
    usage: tuple[UsageRow, ...]
    """Usage from the server's usage API, sorted."""
    usage_of_responses: tuple[UsageRow, ...]
    """Usage from the responses' `usage`, sorted."""
    isolated: bool
    """True if another tenant's adapter and a missing adapter get the same answer."""

    @property
    def failures(self) -> list[str]:
        """One sentence for each promise that was not kept."""
        promises = (
            (
                self.drive.exact >= MIN_EXACT,
                f"only {self.drive.exact:.0%} of the answers are exactly as expected; {MIN_EXACT:.0%} must be",
            ),
            (
                self.sharing.beside_base >= MIN_SHARED,
                f"at most {self.sharing.beside_base} adapters shared a step with the base model; "
                f"{MIN_SHARED} must have",
            ),
            (self.usage == self.usage_of_responses, "the usage rows differ from the usage in the responses"),
            (self.isolated, "a tenant can distinguish another tenant's adapter from a missing one"),
        )
        return [sentence for kept, sentence in promises if not kept]

    def as_json(self) -> dict[str, Any]:
        """Return the document that --json prints."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "url": self.url,
            "exact": self.drive.exact,
            "max_distinct_adapters_in_a_step": self.sharing.in_a_step,
            "max_distinct_adapters_beside_base": self.sharing.beside_base,
            "tokens_per_second": round(self.drive.tokens_per_second, 1),
            "output_tokens": sum(answer.output_tokens for answer in self.drive.answers),
            "seconds": round(self.drive.seconds, 3),
            "usage": [asdict(row) for row in self.usage],
            "usage_equals_responses": self.usage == self.usage_of_responses,
            "tenants_isolated": self.isolated,
            "answers": [
                {
                    "model": answer.model or answer.call.model,
                    "tenant": answer.call.tenant,
                    "endpoint": answer.call.endpoint,
                    "prompt": answer.call.prompt.question,
                    "text": answer.text,
                    "expected": answer.call.prompt.expected,
                    "ok": answer.ok,
                    "error": answer.error,
                    "tool_call": asdict(answer.tool_call) if answer.tool_call else None,
                }
                for answer in self.drive.answers
            ],
        }


def tour(
    url: str,
    keys: dict[str, str],
    show_progress: Callable[[str], None],
    *,
    internal_url: str | None = None,
    verify: ssl.SSLContext | bool = True,
) -> Report:
    """Run all steps and return the report. Raises click.ClickException if the server refuses a call.

    `internal_url` is the address of the metrics, if they have a separate port.
    """
    customers = [Customer(tenant, url, key, verify) for tenant, key in keys.items()]
    for customer in customers:
        show_progress(f"uploading the adapters of {customer.tenant}")
        customer.upload_adapters()
    first, rest = first_of_each_model(plan_calls(load_prompts()))
    show_progress(f"sending one request to each of {len(first)} models, which loads its adapter")
    driven = asyncio.run(drive(url, keys, first, verify))
    # If the engine answers as fast as a busy machine sends, only few requests are there at the same time.
    for crowd in range(MAX_CROWDS):
        show_progress(f"sending {len(rest)} requests at once{', again' if crowd else ''}")
        driven += asyncio.run(drive(url, keys, rest, verify))
        sharing = read_sharing(internal_url or url)
        if sharing.beside_base >= MIN_SHARED:
            break
    show_progress("reading the usage")
    return Report(
        url=url,
        drive=driven,
        sharing=sharing,
        usage=tuple(sorted(row for customer in customers for row in customer.usage())),
        usage_of_responses=tuple(usage_of(driven.answers)),
        isolated=all(
            customer.cannot_detect(f"{other}/{adapter}")
            for customer in customers
            for other, adapters in OWNERS.items()
            if other != customer.tenant
            for adapter in adapters
        ),
    )


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


def show(report: Report, keys: dict[str, str], console: Console, *, links: dict[str, str] | None) -> None:
    """Print the answers, the figures and the usage. If the server continues to run, also print commands to try and
    sign-in links.

    `links` is None if the server ends now, and empty if it has no console.
    """
    console.print(answers_table(report))
    console.print(usage_table(report))
    for line in summary(report):
        console.print(line, highlight=False)
    if links is not None:
        console.print("\nThe server runs until Ctrl-C. Try it:\n", highlight=False)
        lines = (*curl_lines(report, keys), "", *link_lines(report, links))
        print(*lines, sep="\n", file=console.file, flush=True)  # a pipe would buffer the lines


def answers_table(report: Report) -> Table:
    """Return a table of the first questions with every model's answer, and of the first wrong answers."""
    answers = report.drive.answers
    table = Table(
        "prompt",
        "model",
        "answer",
        title=f"{QUESTIONS_SHOWN * MODELS} of {len(answers)} requests, nearly all sent at once",
    )
    for number, answer in enumerate(answers[: QUESTIONS_SHOWN * MODELS]):
        question = answer.call.prompt.question if number % MODELS == 0 else ""
        table.add_row(question, name_of(answer), answer_text(answer), end_section=number % MODELS == MODELS - 1)
    wrong = [answer for answer in answers[QUESTIONS_SHOWN * MODELS :] if not answer.ok]
    for answer in wrong[:WRONG_SHOWN]:
        table.add_row(answer.call.prompt.question, name_of(answer), answer_text(answer))
    return table


def name_of(answer: Answer) -> str:
    """Return the model of the answer, or of the request if there is none."""
    return answer.model or answer.call.model


def answer_text(answer: Answer) -> Text:
    """Return the answer in green, or a wrong answer in red with the expected one."""
    if answer.ok:
        return Text(answer.text, style="green")
    return Text(f"{answer.error or answer.text} (expected: {answer.call.prompt.expected})", style="red")


def usage_table(report: Report) -> Table:
    """Return the usage as a table."""
    table = Table("tenant", "model", title="Usage, as each tenant reads it from the server")
    for heading in ("input tokens", "output tokens", "requests"):
        table.add_column(heading, justify="right")
    for row in report.usage:
        table.add_row(row.tenant, row.model, f"{row.input_tokens}", f"{row.output_tokens}", f"{row.requests}")
    return table


def summary(report: Report) -> Iterator[str]:
    """Yield one line per result."""
    drive, same = report.drive, report.usage == report.usage_of_responses
    right = sum(answer.ok for answer in drive.answers)
    yield f"{right} of {len(drive.answers)} answers are exactly as expected."
    yield f"{report.sharing.beside_base} distinct adapters and the base model shared one step."
    yield f"{drive.tokens_per_second:.0f} generated tokens/s over {drive.seconds:.2f} s."
    yield f"The usage rows {'equal' if same else 'DIFFER FROM'} the sum of `usage` in the responses."
    yield f"Another tenant's adapter {'gets the same 404 as a missing one' if report.isolated else 'IS VISIBLE'}."


def link_lines(report: Report, links: dict[str, str]) -> Iterator[str]:
    """Yield the console's address, and a link that signs a browser in as each tenant."""
    if not links:
        yield "The console is not built in this checkout: run `make console`, and start the demo again."
        return
    yield f"The console: {report.url}/console/"
    for tenant, link in links.items():
        yield f"  as {tenant} (works once, within an hour): {link}"


def curl_lines(report: Report, keys: dict[str, str]) -> Iterator[str]:
    """Yield commands with the real keys, ready to paste."""
    url, question = report.url, report.drive.answers[0].call.prompt.question
    for tenant, key in keys.items():
        adapter = OWNERS[tenant][-1]
        chat: dict[str, Any] = {"model": f"{tenant}/{adapter}", "messages": [{"role": "user", "content": question}]}
        if adapter in TOOLS:
            chat["tools"] = TOOLS[adapter]
        yield f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\"
        yield f"  -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(chat))}"
    yield f"curl {url}/v1/models -H 'Authorization: Bearer {keys['acme']}'"
    yield f"curl '{url}/v1/organization/usage/completions?start_time={int(time.time()) - 3600}&group_by=model' \\"
    yield f"  -H 'Authorization: Bearer {keys['globex']}'"
    yield f"curl {url}/metrics"
