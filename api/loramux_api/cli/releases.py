"""Commands of `loramux adapter` that measure revisions before they are released."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import click

from loramux_api.cli.common import table
from loramux_api.cli.remote import AdapterType, Remote, RemoteRevision, RevisionType, on_server
from loramux_client.objects import EvaluatedRevision, Evaluation, Interval, Policy, RevisionReport, Shadow

GRADERS = ("exact", "contains", "regex", "number", "label")
policy_alias = click.option("--alias", default="default", show_default=True, help="Alias of the adapter.")


@click.command("evaluate")
@click.argument("revision", type=RevisionType())
@click.option("--against", required=True, help="The revision to compare with, such as @2; or base.")
@click.option(
    "--set", "questions", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of questions: lines of {messages or prompt, expected}.",
)  # fmt: skip
@click.option("--examples", "are_examples", is_flag=True, help="The set is a training file: its answers are expected.")
@click.option(
    "--grader",
    default="exact",
    show_default=True,
    help=f'{", ".join(GRADERS)}, or JSON such as \'{{"type": "judge", "url": ..., "model": ...}}\'.',
)
@click.option(
    "--judge-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the API key of the judge's endpoint.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the result.")
@on_server
def evaluate(
    remote: Remote,
    revision: RemoteRevision,
    *,
    against: str,
    questions: Path,
    are_examples: bool,
    grader: str,
    judge_key_file: Path | None,
    wait: bool,
) -> None:
    """Let REVISION and another revision answer the questions of a file, and compare their scores.

    \b
    Example:
      loramux adapter evaluate support@3 --against @2 --set eval.jsonl --grader contains
      loramux adapter evaluate support@1 --against base --set validation.jsonl --examples
    """
    assert revision.number is not None
    key = None if judge_key_file is None else judge_key_file.read_text().strip()
    evaluations = remote.client.evaluations
    made = evaluations.run(
        revision.name,
        revision.number,
        _against(against),
        questions,
        _grader(grader),
        judge_api_key=key,
        purpose="fine-tune" if are_examples else "evals",
    )
    found = evaluations.wait(made.id) if wait else made
    remote.put(found, evaluation_text(found))
    if found.status == "failed":
        raise click.exceptions.Exit(1)


@click.command("policy")
@click.argument("name")
@policy_alias
@click.option(
    "--require",
    "demands",
    multiple=True,
    metavar="DEMAND=NUMBER",
    help="evaluation.margin, evaluation.min_questions, min_requests, max_error_rate, max_first_token_p99_seconds or "
    "min_tokens_per_second; repeatable. All demands replace those of before.",
)
@click.option("--off", is_flag=True, help="Remove the policy.")
@on_server
def policy(remote: Remote, name: str, *, alias: str, demands: tuple[str, ...], off: bool) -> None:
    """Show or set the conditions that a revision must meet before it takes most of an adapter's requests. NAME@3 checks
    a revision.

    \b
    Example:
      loramux adapter policy support --require evaluation.margin=0.02 --require min_requests=500
      loramux adapter policy support@3
    """
    adapters = remote.client.adapters
    plain, _, number = name.partition("@")
    if sum(map(bool, (number, demands, off))) > 1:
        raise click.UsageError(
            "NAME@REVISION checks a revision, --require sets the policy, --off removes it: one of them"
        )
    if off:
        found = adapters.remove_policy(plain, alias)
    elif demands:
        found = adapters.set_policy(plain, _demands(demands), alias)
    else:
        found = adapters.policy(plain, alias, revision=_number(f"@{number}") if number else None)
    remote.put(found, policy_text(plain, found))


@click.command("metrics")
@click.argument("name")
@click.option(
    "--window", type=click.Choice(["1h", "24h", "7d", "30d"]), default="24h", show_default=True, help="Time up to now."
)
@on_server
def metrics(remote: Remote, name: str, window: str) -> None:
    """Show how each revision of an adapter has served, newest first.

    \b
    Example:
      loramux adapter metrics support --window 7d
    """
    found = remote.client.adapters.metrics(name, window)
    heads = ("model", "requests", "failed", "refused", "first token p99", "tokens/s", "feedback")
    remote.put(found, table(heads, map(_report_row, found)) or f"{name} got no requests of yours in {window}")


@click.command("shadow")
@click.argument("revision", type=AdapterType())
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), help="Share of the requests; starts a shadow.")
@click.option(
    "--max-tokens-per-day",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Tokens that the shadow may compute in a day (UTC).",
)
@click.option("--keep-outputs", is_flag=True, help="Keep both answers of each request in files of the callers'.")
@click.option("--stop", is_flag=True, help="End the shadow.")
@on_server
def shadow(
    remote: Remote,
    revision: RemoteRevision,
    *,
    share: float | None,
    max_tokens_per_day: int,
    keep_outputs: bool,
    stop: bool,
) -> None:
    """Show an adapter's shadow, or start one on NAME@REVISION with --share, or end it with --stop.

    \b
    Example:
      loramux adapter shadow support@4 --share 0.1
      loramux adapter shadow support
      loramux adapter shadow support --stop
    """
    adapters = remote.client.adapters
    if stop and share is not None:
        raise click.UsageError("--share starts a shadow, --stop ends it: one of them")
    if share is not None:
        if revision.number is None:
            raise click.UsageError("name the candidate, such as support@4")
        found = adapters.start_shadow(
            revision.name,
            revision.number,
            share,
            max_tokens_per_day=max_tokens_per_day,
            keep_outputs=keep_outputs,
        )
    else:
        found = adapters.stop_shadow(revision.name) if stop else adapters.shadow(revision.name)
    remote.put(found, shadow_text(revision.name, found))


def shadow_text(name: str, found: Shadow) -> str:
    """Return a shadow and its results as lines."""
    state = "runs" if found.ended_at is None else f"has ended ({found.ended_because})"
    dropped = ", ".join(f"{number} {reason}" for reason, number in found.requests.dropped.items() if number)
    lines = [
        f"{name}@{found.revision} {state}: {100 * found.share:g}% of the requests, {found.requests.compared} compared, "
        f"{found.requests.failed} failed" + (f", dropped: {dropped}" if dropped else "")
    ]
    lines += [
        f"  {measure}\t{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})\t{one.requests} requests"
        for measure, one in found.measures.items()
    ]
    return "\n".join(lines)


def evaluation_text(found: Evaluation) -> str:
    """Return an evaluation as lines."""
    if found.result is None:
        reason = "" if found.error is None else f": {found.error}"
        return f"{found.id} is {found.status}{reason} (batch {found.batch_id})"
    result = found.result
    lines = [_side_line(side) for side in (result.candidate, result.against)]
    verdict = (
        "better" if result.difference.low > 0 else "worse" if result.difference.high < 0 else "no difference shown"
    )
    lines.append(
        f"difference {_interval(result.difference)} on {result.questions} questions: {verdict} "
        f"(higher on {result.better}, lower on {result.worse})"
    )
    return "\n".join(lines)


def policy_text(name: str, found: Policy) -> str:
    """Return a policy and its checks as lines."""
    if found.policy is None:
        return f"{name}:{found.alias} has no release policy"
    current = "" if found.current is None else f", now @{found.current}"
    lines = [f"{name}:{found.alias}{current}: {json.dumps(found.policy)}"]
    lines += [f"  {'passes' if check.passed else 'FAILS '}  {check.message}" for check in found.checks]
    if found.passed is not None:
        lines.append(f"@{found.revision} {'passes' if found.passed else 'does not pass'}")
    return "\n".join(lines)


def _demands(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse `evaluation.margin=0.02` and other demands; the server knows which demands exist."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = json.loads(number)
        except ValueError:
            value = None
        if not isinstance(value, int | float):
            raise click.UsageError(f"{text!r} is not DEMAND=NUMBER, such as min_requests=500")
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return found


def _against(text: str) -> int | Literal["base"]:
    return "base" if text == "base" else _number(text)


def _number(text: str) -> int:
    number = text.removeprefix("@")
    if not (number.isascii() and number.isdigit() and 1 <= len(number) <= 9) or int(number) == 0:
        raise click.UsageError(f"{text!r} is not a revision; write @NUMBER, such as @2")
    return int(number)


def _grader(text: str) -> dict[str, Any]:
    if text in GRADERS:
        return {"type": text}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.UsageError(f"--grader is one of {', '.join(GRADERS)}, or a JSON object with its 'type'")
    return found


def _interval(one: Interval) -> str:
    return f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"


def _side_line(side: EvaluatedRevision) -> str:
    line = f"{side.model}\tscore {_interval(side.score)}\t{side.errors} errors\t{side.output_tokens} tokens"
    if side.latency is not None:
        line += f"\tfirst token p50 {side.latency.first_token_seconds['p50']:.3f} s"
    return line if side.cost is None else f"{line}\t{side.cost.amount} {side.cost.currency}"


def _report_row(report: RevisionReport) -> tuple[object, ...]:
    p99, mean = report.first_token_seconds.get("p99"), report.feedback.mean_score
    return (
        report.model,
        report.requests,
        report.failed,
        report.refused,
        "" if p99 is None else f"{p99:.3f} s",
        "" if report.tokens_per_second is None else f"{report.tokens_per_second:.1f}",
        "" if mean is None else f"{mean:.2f} ({report.feedback.count})",
    )
