"""`loramux batch` and the measuring commands of `loramux adapter`, and the typed client below them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from peft_uploads import form, make_adapter
from scripted_engine import EOS, echo
from site_fixture import Site

from loramux_api.cli.main import main
from loramux_client import AsyncClient, Client, Conflict, InvalidRequest, NotFound

numbers = itertools.count()


@pytest.fixture
def name(site: Site, base_dir: Path, tmp_path: Path) -> Iterator[str]:
    """An adapter with two revisions, the first of which is released; the second is worse on half of the questions."""
    name = f"measured-{next(numbers)}"
    with site.http() as http:
        for seed in (41, 42):
            made = http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path / f"{seed}", seed=seed), name))
            assert made.status_code == 201, made.text
        http.post(f"/v1/adapters/{name}/promote", json={"revision": 1})
        digest = http.get(f"/v1/adapters/{name}/revisions/1").json()["digest"]

        def script(request: Any) -> list[Any]:
            knows = request.adapter is None or request.adapter.digest.startswith(digest)
            return [*(b"yes" if knows or request.prompt_token_ids[-1] % 2 else b"no"), EOS]

        site.engine.script = script
        yield name
        site.engine.script = echo
        http.delete(f"/v1/adapters/{name}", params={"undo_s": 0})


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "eval.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"question {n}", "expected": "yes"}) for n in range(40)))
    return file


def loramux(site: Site, *arguments: str, code: int = 0) -> str:
    environment = {"LORAMUX_API_KEY": site.keys["all-scopes"], "LORAMUX_URL": site.url, "LORAMUX_CONFIG": ""}
    result = CliRunner().invoke(main, arguments, env=environment)
    assert result.exit_code == code, result.output
    return result.output


def test_batch_commands_run_a_file_and_write_its_answers(site: Site, tmp_path: Path) -> None:
    lines, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    lines.write_text("\n".join(json.dumps(request | {"custom_id": f"q-{n}"}) for n in range(3)))
    ran = ("batch", "run", str(lines), "--endpoint", "/v1/completions", "--output", str(answers), "--json")
    made = json.loads(loramux(site, *ran))
    assert (made["status"], made["request_counts"]["completed"]) == ("completed", 3)
    assert [json.loads(line)["custom_id"] for line in answers.read_text().splitlines()] == ["q-0", "q-1", "q-2"]
    assert made["id"] in loramux(site, "batch", "ls")
    heads, row = loramux(site, "batch", "show", made["id"]).splitlines()[:2]
    assert dict(zip(heads.split(), row.split(), strict=True))["answered"] == "3"
    loramux(site, "batch", "output", made["id"], str(tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_bytes() == answers.read_bytes()
    refused = loramux(site, "batch", "output", made["id"], str(tmp_path / "errors.jsonl"), "--errors", code=1)
    assert "has no such file" in refused
    assert "completed" in loramux(site, "batch", "cancel", made["id"])


def test_batch_command_shows_the_line_that_is_wrong_and_fails(site: Site, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"custom_id": "a"}\n')
    shown = loramux(site, "batch", "run", str(tmp_path / "lines.jsonl"), "--wait", code=1)
    assert "failed" in shown
    assert "line 1" in shown


def test_adapter_commands_evaluate_and_refuse_a_worse_revision_with_the_numbers(
    site: Site, name: str, questions: Path
) -> None:
    assert "no release policy" in loramux(site, "adapter", "policy", name)
    policy = loramux(site, "adapter", "policy", name, "--require", "evaluation.margin=0.05")
    assert '"margin": 0.05' in policy
    shown = loramux(site, "adapter", "evaluate", f"{name}@2", "--against", "@1", "--set", str(questions))
    assert "worse (higher on 0, lower on 20)" in shown
    checked = loramux(site, "adapter", "policy", f"{name}@2")
    assert "FAILS" in checked
    assert "@2 does not pass" in checked
    refused = loramux(site, "adapter", "promote", f"{name}@2", code=1)
    assert "@2 scores 0.500, @1 1.000" in refused
    assert "no release policy" in loramux(site, "adapter", "policy", name, "--off")
    loramux(site, "adapter", "promote", f"{name}@2")
    assert f"{name}@2" in loramux(site, "adapter", "metrics", name) or "no requests" in loramux(
        site, "adapter", "metrics", name
    )


def test_adapter_command_evaluates_a_revision_against_its_base_on_a_training_file(
    site: Site, name: str, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "valid.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 10))
    given = ("--against", "base", "--set", str(tmp_path / "valid.jsonl"), "--examples")
    shown = loramux(site, "adapter", "evaluate", f"{name}@2", *given)
    assert "tiny" in shown
    assert "worse (higher on 0, lower on 10)" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "x@2", "--off"),
        ("policy", "x", "--off", "--require", "min_requests=3"),
        ("policy", "x", "--require", "min_requests"),
        ("evaluate", "x@2", "--against", "second", "--set", "{set}"),
        ("evaluate", "x@2", "--against", "@1", "--set", "{set}", "--grader", "magic"),
    ],
)
def test_adapter_commands_with_wrong_arguments_say_what_is_meant(
    site: Site, questions: Path, arguments: tuple[str, ...]
) -> None:
    given = [str(questions) if one == "{set}" else one for one in arguments]
    assert "Error: " in loramux(site, "adapter", *given, code=2)


def test_client_evaluates_and_reads_policy_and_metrics_in_types(site: Site, name: str, questions: Path) -> None:
    with Client(site.url, api_key=site.keys["all-scopes"]) as client:
        made = client.evaluations.run(name, 2, 1, questions, {"type": "exact"})
        found = client.evaluations.wait(made.id)
        assert found.result is not None, found.error
        assert found.result.difference.high < 0
        assert client.evaluations.list(name, 2)[0].id == made.id
        assert client.evaluations.list(name, 1) == []
        set_ = client.adapters.set_policy(name, {"evaluation": {"margin": 0.1}})
        assert set_.policy is not None
        with pytest.raises(Conflict) as refused:
            client.adapters.promote(name, 2)
        assert refused.value.code == "release_policy"
        assert client.adapters.policy(name, revision=2).passed is False
        client.adapters.remove_policy(name)
        assert client.adapters.promote(name, 2).revision == 2
        with pytest.raises(InvalidRequest):
            client.evaluations.create(name, 2, 1, found.file_id, {"type": "magic"})


def test_async_client_sends_reads_and_deletes_files(site: Site, tmp_path: Path) -> None:
    (tmp_path / 'odd "name".jsonl').write_bytes(b'{"prompt": "x"}\n')

    async def run() -> None:
        client = AsyncClient(site.url, api_key=site.keys["all-scopes"])
        sent = await client.files.create(tmp_path / 'odd "name".jsonl', "evals")
        assert (sent.purpose, sent.bytes) == ("evals", 16)
        assert await client.files.content(sent.id) == b'{"prompt": "x"}\n'
        assert sent.id in [one.id for one in await client.files.list("evals")]
        assert (await client.files.get(sent.id)).id == sent.id
        await client.files.delete(sent.id)
        with pytest.raises(NotFound):
            await client.files.get(sent.id)
        await client.close()

    asyncio.run(run())


def test_shadow_command_starts_shows_and_ends_a_shadow(site: Site, name: str) -> None:
    assert "has had no shadow" in loramux(site, "adapter", "shadow", name, code=1)
    assert "name the candidate" in loramux(site, "adapter", "shadow", name, "--share", "0.5", code=2)
    assert f"{name}@2 runs: 100% of the requests" in loramux(site, "adapter", "shadow", f"{name}@2", "--share", "1")
    client = Client(site.url, api_key=site.keys["all-scopes"])
    site.openai("all-scopes").completions.create(model=f"acme/{name}", prompt="hello", max_tokens=5)
    deadline = time.monotonic() + 60
    while not (found := client.adapters.shadow(name)).requests.compared:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    shown = loramux(site, "adapter", "shadow", name, "--stop")
    assert "has ended (stopped)" in shown
    assert "exact\t" in shown
    (ended,) = client.adapters.shadows(name)
    assert (ended.ended_because, ended.measures["exact"].requests) == ("stopped", 1)
    again = client.adapters.start_shadow(name, 2, 0.25, max_tokens_per_day=99)
    assert (again.share, again.max_tokens_per_day, client.adapters.stop_shadow(name).id) == (0.25, 99, again.id)
