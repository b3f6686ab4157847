"""The report of a demo run: the results, the checks, and their output as JSON or on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux_demo.assets import OWNERS, TOOLS
from loramux_demo.customers import StepSharing, UsageRow
from loramux_demo.drive import Answer, Drive

MIN_EXACT = 0.9
MIN_SHARED = 5
"""Adapters beside the base in one step; a sixth may come a moment later on a busy machine."""
QUESTIONS_SHOWN = 3
WRONG_SHOWN = 10
MODELS = 1 + sum(map(len, OWNERS.values()))


@dataclass(frozen=True)
class Report:
    """The results of one run."""

    url: str
    drive: Drive
    sharing: StepSharing
    usage: tuple[UsageRow, ...]
    """From the server's usage API, sorted."""
    usage_of_responses: tuple[UsageRow, ...]
    """From the responses' `usage`, sorted."""
    isolated: bool
    """True if another tenant's adapter and a missing adapter get the same answer."""

    @property
    def failures(self) -> list[str]:
        """A sentence for each promise that was not kept."""
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


def show(report: Report, keys: dict[str, str], console: Console, *, links: dict[str, str]) -> None:
    """Print the answers, the figures and the usage; where the server runs on, commands to try and sign-in links."""
    console.print(answers_table(report))
    console.print(usage_table(report))
    for line in summary(report):
        console.print(line, highlight=False)
    if links:
        console.print("\nThe server runs until Ctrl-C. Try it:\n", highlight=False)
        lines = (*curl_lines(report, keys), "", *link_lines(report, links))
        print(*lines, sep="\n", file=console.file, flush=True)  # a pipe would buffer them


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
        yield f"  -H 'Content-Type: application/json' -d '{json.dumps(chat)}'"
    yield f"curl {url}/v1/models -H 'Authorization: Bearer {keys['acme']}'"
    yield f"curl '{url}/v1/organization/usage/completions?start_time={int(time.time()) - 3600}&group_by=model' \\"
    yield f"  -H 'Authorization: Bearer {keys['globex']}'"
    yield f"curl {url}/metrics"
