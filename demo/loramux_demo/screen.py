"""The report as a person reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loramux_demo.assets import OWNERS
from loramux_demo.drive import Answer
from loramux_demo.report import Report

QUESTIONS_SHOWN = 3
WRONG_SHOWN = 10
MODELS = 1 + sum(map(len, OWNERS.values()))


def show(report: Report, keys: dict[str, str], console: Console, *, serving: bool) -> None:
    """Answers side by side, what shared a step, speed, and the bill; and how to go on while the server serves."""
    console.print(answers_table(report))
    console.print(usage_table(report))
    for line in summary(report):
        console.print(line, highlight=False)
    if serving:
        console.print("\nServing on until Ctrl-C. Go on by hand:\n", highlight=False)
        print(*curl_lines(report, keys), sep="\n", file=console.file, flush=True)  # a pipe would keep them for itself


def answers_table(report: Report) -> Table:
    """The first questions with every model's answer, side by side, and the first few that went wrong."""
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
    """As the server resolved it, or as it was asked for."""
    return answer.model or answer.call.model


def answer_text(answer: Answer) -> Text:
    """The answer, and in red what it should have been."""
    if answer.ok:
        return Text(answer.text, style="green")
    return Text(f"{answer.error or answer.text} (expected: {answer.call.prompt.expected})", style="red")


def usage_table(report: Report) -> Table:
    """The bill."""
    table = Table("tenant", "model", title="Usage, as each tenant reads it from the server")
    for heading in ("input tokens", "output tokens", "requests"):
        table.add_column(heading, justify="right")
    for row in report.usage:
        table.add_row(row.tenant, row.model, f"{row.input_tokens}", f"{row.output_tokens}", f"{row.requests}")
    return table


def summary(report: Report) -> Iterator[str]:
    """The figures, a line each."""
    drive, same = report.drive, report.usage == report.usage_of_responses
    right = sum(answer.ok for answer in drive.answers)
    yield f"{right} of {len(drive.answers)} answers are exactly as expected."
    yield f"{report.sharing.beside_base} distinct adapters and the base model shared one step."
    yield f"{drive.tokens_per_second:.0f} generated tokens/s over {drive.seconds:.2f} s."
    yield f"The usage rows {'equal' if same else 'DIFFER FROM'} the sum of `usage` in the responses."
    yield f"Another tenant's adapter {'looks like one that is absent: the same 404' if report.isolated else 'SHOWS'}."


def curl_lines(report: Report, keys: dict[str, str]) -> Iterator[str]:
    """Commands with the real keys, each ready to be pasted."""
    url, question = report.url, report.drive.answers[0].call.prompt.question
    for tenant, key in keys.items():
        chat = {"model": f"{tenant}/{OWNERS[tenant][-1]}", "messages": [{"role": "user", "content": question}]}
        yield f"curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\"
        yield f"  -H 'Content-Type: application/json' -d '{json.dumps(chat)}'"
    yield f"curl {url}/v1/models -H 'Authorization: Bearer {keys['acme']}'"
    yield f"curl '{url}/v1/organization/usage/completions?start_time={int(time.time()) - 3600}&group_by=model' \\"
    yield f"  -H 'Authorization: Bearer {keys['globex']}'"
    yield f"curl {url}/metrics"
