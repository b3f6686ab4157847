"""Fine-tuning jobs by the official client: training files, jobs without a trainer, and jobs with a scripted one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from flat_prices import SINCE
from peft_uploads import make_adapter
from scripted_trainer import ScriptedTrainer, scripted_trainer
from site_fixture import Site
from training_files import jsonl, shouted

from loramux.accounts.tenants.account import KeyRequest
from loramux.batches.files import MIN_RETENTION
from loramux.data.entities import Refusal
from loramux.data.records.database import Database
from loramux.money.billing.catalog import Catalog, PlanPrices, PlanSpec, PriceSpec
from loramux.money.billing.reconcile import reconcile
from loramux.money.limits.limits import Limits
from loramux.server.platform import open_tenants
from loramux_client import Client

ENDS = ("succeeded", "failed", "cancelled")
PREFERENCE = {
    "input": {"messages": [{"role": "user", "content": "Hi?"}]},
    "preferred_output": [{"role": "assistant", "content": "Hello."}],
    "non_preferred_output": [{"role": "assistant", "content": "No."}],
}


IMAGE = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


def user(content: Any = "Hi?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


def assistant(content: Any = "Hello.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


@pytest.fixture
def tenant(site: Site) -> str:
    """A tenant of the test's own, by its key's name."""
    name = f"t{time.monotonic_ns()}"
    with site.http("all-scopes") as http:
        http.post("/admin/tenants", json={"name": name}).raise_for_status()
        site.keys[name] = http.post(f"/admin/tenants/{name}/keys", json={}).json()["key"]
    return name


@pytest.fixture
def client(site: Site, tenant: str) -> Iterator[openai.OpenAI]:
    with site.openai(tenant) as client:
        yield client


def sent(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("train.jsonl", data), purpose="fine-tune").id


def until(client: openai.OpenAI, id: str, *states: str) -> Any:
    deadline = time.monotonic() + 60
    while (job := client.fine_tuning.jobs.retrieve(id)).status not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n \n\n", "at least 10 examples"),
        (jsonl(shouted(9)), "at least 10 examples, one JSON object per line; this one has 9"),
        (jsonl(shouted(10)) + b'{"messages": [\n', "Line 11: this line is not valid JSON"),
        (jsonl(shouted(10)) + b'{"messages": "\xff\xfe"}\n', "Line 11: this line is not UTF-8"),
        (jsonl(shouted(10)) + b"[1]\n", "Line 11: Expected `object`, got `array`"),
        (jsonl([*shouted(10), {"prompt": "a", "completion": "b"}]), "Line 11: Object contains unknown field"),
        (jsonl([*shouted(10), chat(user())]), "Line 11: 'messages' ends with the assistant's message"),
        (jsonl([*shouted(10), chat(user(), assistant(weight=0))]), "Line 11: 'messages' has no message to learn"),
        (jsonl([*shouted(10), chat(user(weight=1), assistant())]), "'messages[0].weight' is 0 or 1"),
        (jsonl([*shouted(10), chat(user(), assistant(weight=0.5))]), "'messages[1].weight' is 0 or 1"),
        (jsonl([*shouted(10), chat({"role": "robot", "content": "x"}, assistant())]), "'messages[0].role'"),
        (jsonl([*shouted(10), chat(user(), assistant(None))]), "neither 'content' nor 'tool_calls'"),
        (jsonl([*shouted(10), chat()]), "Line 11"),
        (jsonl([*shouted(10), chat(user([IMAGE]), assistant())]), "models are trained on text only"),
        (jsonl([*shouted(10), chat(user(), assistant(), tools=[{"type": "function"}])]), "Line 11"),
        (jsonl([*shouted(10), PREFERENCE]), "has 'messages' and line 11 a preference"),
        (jsonl([*shouted(10), PREFERENCE | {"preferred_output": [user()]}]), "is a list of one assistant's message"),
        (
            jsonl([*shouted(10), PREFERENCE | {"non_preferred_output": PREFERENCE["preferred_output"]}]),
            "are the same",
        ),
        (jsonl(shouted(10)) + b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "Line 11"),
        (jsonl([*shouted(10), *[chat(user())] * 8]), "Line 15: 'messages' ends with the assistant's message"),
    ],
)
def test_hostile_training_file_is_refused_with_its_line(client: openai.OpenAI, data: bytes, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sent(client, data)
    assert message in refused.value.body["message"], refused.value.body
    assert refused.value.code == "invalid_file"
    assert not client.files.list().data, "nothing of it is stored"


def test_errors_beyond_the_fifth_are_counted(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="3 more lines have errors"):
        sent(client, jsonl([*shouted(10), *[chat(user())] * 8]))


def test_line_that_exceeds_its_limit_is_refused_without_reading_it(client: openai.OpenAI) -> None:
    long = json.dumps(chat(user("x" * (2 << 20)), assistant())).encode() + b"\n"
    with pytest.raises(openai.BadRequestError, match="Line 11: a line has at most 1049600 bytes; this one has 20"):
        sent(client, jsonl(shouted(10)) + long)


def test_empty_training_file_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="The file is empty"):
        sent(client, b"")


def test_training_file_with_tools_weights_and_preferences_is_stored(client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    talk = chat(
        {"role": "developer", "content": "Be brief."},
        user(),
        assistant("First.", weight=0),
        user([{"type": "text", "text": "Again?"}]),
        assistant(None, tool_calls=[call]),
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
        assistant("Done.", weight=1),
        tools=[tool],
        parallel_tool_calls=False,
    )
    assert client.files.retrieve(sent(client, jsonl([talk] * 10))).purpose == "fine-tune"
    assert client.files.retrieve(sent(client, b"\xef\xbb\xbf" + jsonl([PREFERENCE] * 10))).status == "processed"


def test_job_is_created_listed_paused_resumed_and_cancelled_without_a_trainer(client: openai.OpenAI) -> None:
    file = sent(client, jsonl(shouted()))
    jobs = client.fine_tuning.jobs
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}
    made = jobs.create(
        model="tiny",
        training_file=file,
        suffix="loud",
        seed=7,
        method=method,
        metadata={"team": "a"},
        extra_body={"lora": {"r": 4, "target_modules": ["q_proj"], "use_rslora": True}},
    )
    assert (made.object, made.status, made.model, made.seed) == ("fine_tuning.job", "validating_files", "tiny", 7)
    assert (made.metadata, made.training_file, made.fine_tuned_model) == ({"team": "a"}, file, None)
    assert made.hyperparameters.n_epochs == 2
    assert made.hyperparameters.batch_size == "auto"
    assert made.method is not None
    assert made.method.type == "supervised"
    assert made.to_dict()["lora"] == {
        "r": 4,
        "alpha": 8,
        "target_modules": ["q_proj"],
        "use_rslora": True,
        "use_dora": False,
    }
    with pytest.raises(openai.ConflictError, match=f"The fine-tuning job '{made.id}' reads the file"):
        client.files.delete(file)
    assert [job.id for job in jobs.list()] == [made.id]
    jobs.pause(made.id)
    until(client, made.id, "paused")
    assert jobs.resume(made.id).status == "validating_files"
    with pytest.raises(openai.ConflictError, match="resumed from 'paused'"):
        jobs.resume(made.id)
    jobs.cancel(made.id)
    ended = until(client, made.id, "cancelled")
    assert (ended.trained_tokens, ended.error, ended.fine_tuned_model) == (0, None, None)
    assert ended.finished_at is not None
    assert jobs.cancel(made.id).status == "cancelled", "a second one changes nothing"
    events = list(jobs.list_events(made.id, limit=2))
    assert [event.message for event in events][-1] == f"Created fine-tuning job: {made.id}"
    assert events[0].message == "The job was cancelled"
    assert list(jobs.checkpoints.list(made.id)) == []
    client.files.delete(file)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}}, "'method.type' is 'reinforcement'"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": -1}}}}, "beta"),
        ({"method": {"type": "supervised", "dpo": {}}}, "'method.dpo' belongs to the method of this name"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 0.1}}}}, "beta"),
        ({"method": {"type": "magic"}}, "'method.type' is 'supervised' or 'dpo'; got 'magic'"),
        ({"method": {"type": "supervised"}, "hyperparameters": {"n_epochs": 1}}, "in 'method' only"),
        ({"hyperparameters": {"n_epochs": 0}}, "n_epochs"),
        ({"hyperparameters": {"learning_rate_multiplier": -1}}, "learning_rate_multiplier"),
        ({"hyperparameters": {"learning_rate_multiplier": 1e9}}, "learning_rate_multiplier"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "'integrations' is not supported"),
        ({"lora": {"r": 4096}}, "'lora.r' is at most"),
        ({"lora": {"r": 0}}, "lora.r"),
        ({"lora": {"target_modules": [".*("]}}, "target_modules"),
        ({"suffix": "Not A Name"}, "is no name for an adapter"),
        ({"model": "nothing"}, "`nothing`"),
        ({"training_file": "file-none"}, "No such file"),
        ({"validation_file": "file-none"}, "No such file"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_job_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], message: str) -> None:
    asked = {"model": "tiny", "training_file": sent(client, jsonl(shouted()))} | more
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/fine_tuning/jobs", body=asked, cast_to=object)
    assert 400 <= refused.value.status_code < 500
    assert message in refused.value.message, refused.value.message
    assert not client.fine_tuning.jobs.list().data


def test_jobs_are_listed_by_their_metadata_only(client: openai.OpenAI) -> None:
    file, jobs = sent(client, jsonl(shouted())), client.fine_tuning.jobs
    tags = ({"team": "a", "note": '"team":"b"'}, {"team": "A"}, {})
    made = [jobs.create(model="tiny", training_file=file, metadata=one).id for one in tags]
    for wanted, found in (
        ({"team": "a"}, made[:1]),
        ({"team": "A"}, made[1:2]),
        ({"team": "b"}, []),
        ({"note": '"team":"b"'}, made[:1]),
        ({"team": "a", "note": "x"}, []),
        ({}, made[::-1]),
    ):
        assert [job.id for job in jobs.list(metadata=wanted, limit=1)] == found, wanted
    with pytest.raises(openai.BadRequestError, match=r"metadata\[NAME\]=VALUE"):
        jobs.list(extra_query={"metadata": "a"})
    for id in made:
        jobs.cancel(id)


def test_job_of_preferences_has_the_hyperparameters_of_its_method(client: openai.OpenAI) -> None:
    file = sent(client, jsonl([PREFERENCE] * 10))
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}}
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file, method=method)
    assert made.method is not None
    assert made.method.dpo is not None
    assert made.method.dpo.hyperparameters is not None
    assert (made.method.type, made.method.supervised) == ("dpo", None)
    assert made.method.dpo.hyperparameters.beta == 0.2
    assert made.method.dpo.hyperparameters.batch_size == "auto"
    client.fine_tuning.jobs.cancel(made.id)


def test_file_of_another_purpose_is_no_training_file(client: openai.OpenAI) -> None:
    file = client.files.create(file=("b.jsonl", b"{}\n"), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.create(model="tiny", training_file=file.id)


def test_tenants_unfinished_jobs_are_bounded(client: openai.OpenAI) -> None:
    file = sent(client, jsonl(shouted()))
    made = [client.fine_tuning.jobs.create(model="tiny", training_file=file) for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="3 unfinished fine-tuning jobs"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file)
    for job in made:
        client.fine_tuning.jobs.cancel(job.id)


def test_job_is_another_tenants_secret(client: openai.OpenAI, site: Site) -> None:
    file = sent(client, jsonl(shouted()))
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file)
    with site.openai("acme") as other:
        for call in (
            other.fine_tuning.jobs.retrieve,
            other.fine_tuning.jobs.cancel,
            other.fine_tuning.jobs.pause,
            other.fine_tuning.jobs.list_events,
            other.fine_tuning.jobs.checkpoints.list,
        ):
            with pytest.raises(openai.NotFoundError):
                call(job.id)
        with pytest.raises(openai.NotFoundError):
            other.fine_tuning.jobs.create(model="tiny", training_file=file)
        assert job.id not in [one.id for one in other.fine_tuning.jobs.list()]
    client.fine_tuning.jobs.cancel(job.id)


def test_job_needs_the_scope_adapters(client: openai.OpenAI, site: Site, tenant: str) -> None:
    async def make() -> str:
        async with open_tenants(site.settings) as tenants:
            account = await tenants.account(tenant)
            return (await account.keys.create(KeyRequest(scopes=frozenset({"inference"}))))[1]

    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=asyncio.run(make()), max_retries=0) as narrow:
        file = sent(narrow, jsonl(shouted()))
        with pytest.raises(openai.PermissionDeniedError):
            narrow.fine_tuning.jobs.create(model="tiny", training_file=file)


NANO_PER_TOKEN = 10_000_000
"""A trained token costs a cent, and a prompt token of a request 100 USD."""


def with_budget(site: Site, tenant: str, tokens: int) -> None:
    """Give the tenant prices, and a budget for so many trained tokens."""

    async def give() -> None:
        database = Database(site.settings.records.url)
        since = date(2023, 1, 1)
        prices = (
            PriceSpec(meter="input_uncached", price="100", valid_from=since),
            PriceSpec(meter="input_uncached", tier="*/training", price="0.01", valid_from=since),
        )
        await Catalog(database).apply([PlanSpec(name="training", currency="USD", prices=prices)])
        await Catalog(database).subscribe(tenant, "training", SINCE)
        async with open_tenants(site.settings) as tenants:
            limits = Limits(tenants.changes, PlanPrices(database))
            found = await tenants.named(tenant)
            await limits.put_budget(found.id, found.id, "month", tokens * NANO_PER_TOKEN)
        await database.close()

    asyncio.run(give())


def job_of(client: openai.OpenAI, **more: Any) -> str:
    return client.fine_tuning.jobs.create(model="tiny", training_file=sent(client, jsonl(shouted())), **more).id


def entries(site: Site, job_id: str) -> list[Any]:
    """The ledger's entries of a job's requests."""

    async def read() -> list[Any]:
        database = Database(site.settings.records.url)
        async with database.read() as session:
            found = await session.execute(
                sa.text(
                    "SELECT kind, status, input_tokens, waived_input_tokens, tier FROM ledger_entries "
                    "WHERE request_id LIKE :id ORDER BY sequence"
                ),
                {"id": f"{job_id}.%"},
            )
            rows = [tuple(row) for row in found]
        await database.close()
        return rows

    return asyncio.run(read())


def drift(site: Site) -> int:
    """The tokens by which the ledger differs from the counts of engines and trainers; the chain is verified too."""

    async def read() -> int:
        database = Database(site.settings.records.url)
        found = await reconcile(database)
        await database.close()
        return found.drift_tokens

    return asyncio.run(read())


def scripted(site: Site, act: Any) -> Any:
    async def run() -> Any:
        async with scripted_trainer(site.settings) as trainer:
            return await act(trainer)

    return asyncio.run(run())


def test_finished_job_is_a_revision_and_bills_its_tokens_once(
    client: openai.OpenAI, site: Site, tenant: str, base_dir: Path, tmp_path: Path
) -> None:
    id = job_of(client, suffix="loud")
    first, last = make_adapter(base_dir, tmp_path / "first", seed=1), make_adapter(base_dir, tmp_path / "last", seed=2)

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 2000, epochs=2)
        await trainer.until(id, "running")
        await trainer.save(id, first, 2, 1000)
        await trainer.save(id, last, 4, 2000)
        await trainer.end(id, "succeeded")

    scripted(site, train)
    job = until(client, id, *ENDS)
    assert (job.status, job.fine_tuned_model, job.trained_tokens) == ("succeeded", f"{tenant}/loud@1", 2000)
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(id))
    assert [(one.step_number, one.fine_tuned_model_checkpoint) for one in checkpoints] == [
        (4, f"{tenant}/loud@1"),
        (2, f"{tenant}/loud@2"),
    ]
    assert entries(site, id) == [("usage", "completed", 2000, 0, "standard/training")]
    assert drift(site) == 0
    with site.http(tenant) as http:
        events = http.get("/v1/events").json()["data"]
        [ended] = [one["data"] for one in events if one["type"] == "fine_tuning.job.succeeded"]
        assert ended == {"id": id, "adapter": f"{tenant}/loud"}
        aliases = http.get("/v1/adapters/loud").json()["aliases"]
        cards = [http.get(f"/v1/adapters/loud/revisions/{number}").json()["training"] for number in (1, 2)]
        listed = http.get("/v1/adapters/loud/revisions").json()["data"]
    assert [target["revision"] for alias in aliases for target in alias["targets"]] == [1], "a checkpoint moves nothing"
    assert [(card["job"], card["step"], card["trained_tokens"]) for card in cards] == [(id, 4, 2000), (id, 2, 1000)]
    card = cards[0]
    assert (card["model"], card["digests"]) == ("tiny", {"training_file": "d" * 64})
    assert (card["method"], card["n_epochs"], card["batch_size"], card["seed"]) == ("supervised", 2, 8, 0)
    assert (card["lora"]["r"], card["metrics"]) == (16, {"step": 4, "train_loss": 0.5})
    assert len(card["chat_template"]) == 64
    assert all("training" not in one for one in listed)
    stored = Path(site.settings.records.blobs) / "training" / id
    assert not stored.exists(), "its checkpoints are revisions now"


def test_failed_job_costs_nothing(client: openai.OpenAI, site: Site, base_dir: Path, tmp_path: Path) -> None:
    id, adapter = job_of(client), make_adapter(base_dir, tmp_path / "adapter")

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 2000)
        await trainer.until(id, "running")
        await trainer.save(id, adapter, 1, 1000)
        await trainer.end(id, "failed", Refusal("training_diverged", "The loss is not a number at step 2."))

    scripted(site, train)
    job = until(client, id, *ENDS)
    assert (job.status, job.fine_tuned_model) == ("failed", None)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("training_diverged", "The loss is not a number at step 2.")
    assert entries(site, id) == [("usage", "failed", 0, 1000, "standard/training")]


def test_cancelled_job_keeps_its_last_checkpoint_and_bills_the_tokens_up_to_it(
    client: openai.OpenAI, site: Site, tenant: str, base_dir: Path, tmp_path: Path
) -> None:
    id, adapter = job_of(client, suffix="half"), make_adapter(base_dir, tmp_path / "adapter")

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 2000)
        await trainer.until(id, "running")
        await trainer.save(id, adapter, 1, 700, is_epoch=False)
        await asyncio.to_thread(client.fine_tuning.jobs.cancel, id)
        await trainer.until(id, "cancel")
        await trainer.end(id, "cancelled")

    scripted(site, train)
    job = until(client, id, *ENDS)
    assert (job.status, job.fine_tuned_model, job.trained_tokens) == ("cancelled", None, 700)
    (kept,) = client.fine_tuning.jobs.checkpoints.list(id)
    assert kept.fine_tuned_model_checkpoint == f"{tenant}/half@1"
    assert entries(site, id) == [("usage", "cancelled", 700, 0, "standard/training")]


def test_job_of_a_dead_trainer_is_free_for_the_next_one(client: openai.OpenAI, site: Site) -> None:
    id = job_of(client)

    async def take(trainer: ScriptedTrainer) -> int:
        return (await trainer.take(id)).trainer_attempts

    assert scripted(site, take) == 1
    deadline = time.monotonic() + 120
    while True:
        try:
            assert scripted(site, take) == 2
            break
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    client.fine_tuning.jobs.cancel(id)
    until(client, id, "cancelled")


def test_job_whose_result_is_no_adapter_fails_and_costs_nothing(
    client: openai.OpenAI, site: Site, base_dir: Path, tmp_path: Path
) -> None:
    id, adapter = job_of(client), make_adapter(base_dir, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(b"not weights")

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 2000)
        await trainer.until(id, "running")
        await trainer.save(id, adapter, 1, 2000)
        await trainer.end(id, "succeeded")

    scripted(site, train)
    job = until(client, id, *ENDS)
    assert job.status == "failed"
    assert entries(site, id) == [("usage", "failed", 0, 2000, "standard/training")]


def test_second_job_of_a_budget_for_one_is_refused_before_it_runs(
    client: openai.OpenAI, site: Site, tenant: str
) -> None:
    with_budget(site, tenant, tokens=3000)
    first, second = job_of(client), job_of(client)

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(first)
        await trainer.plan(first, 2000)
        await trainer.until(first, "running")
        await trainer.take(second)
        await trainer.plan(second, 2000)
        refused = await asyncio.to_thread(until, client, second, *ENDS)
        assert refused.status == "failed"
        assert refused.error.code == "insufficient_quota"
        assert "may cost 20.000000002 USD" in refused.error.message, "the price of a training, not of a request"
        await trainer.end(first, "cancelled")

    scripted(site, train)
    assert until(client, first, *ENDS).status == "cancelled"
    assert entries(site, second) == [], "nothing was opened"
    third = job_of(client)

    async def train_third(trainer: ScriptedTrainer) -> None:
        await trainer.take(third)
        await trainer.plan(third, 2900)
        await trainer.until(third, "running")
        await trainer.end(third, "cancelled")

    scripted(site, train_third)  # the first one's hold was given back
    until(client, third, *ENDS)


def test_tokens_of_a_training_take_nothing_from_the_limits_of_a_minute(
    client: openai.OpenAI, site: Site, tenant: str
) -> None:
    with site.http("all-scopes") as http:
        http.put(f"/admin/tenants/{tenant}/limits/tokens_per_minute", json={"value": 100}).raise_for_status()
    id = job_of(client)

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 1_000_000)
        await trainer.until(id, "running")
        await trainer.end(id, "cancelled")

    scripted(site, train)
    until(client, id, *ENDS)


def test_job_of_a_revoked_key_ends_before_it_runs(client: openai.OpenAI, site: Site, tenant: str) -> None:
    async def make() -> tuple[str, str]:
        async with open_tenants(site.settings) as tenants:
            account = await tenants.account(tenant)
            key, secret = await account.keys.create(KeyRequest(scopes=frozenset({"inference", "adapters"})))
            return key.id, secret

    async def revoke(id: str) -> None:
        async with open_tenants(site.settings) as tenants:
            await tenants.revoke_key(id)

    key, secret = asyncio.run(make())
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=secret, max_retries=0) as short_lived:
        id = job_of(short_lived)
    asyncio.run(revoke(key))

    async def train(trainer: ScriptedTrainer) -> None:
        await trainer.take(id)
        await trainer.plan(id, 1000)
        await asyncio.to_thread(until, client, id, *ENDS)

    scripted(site, train)
    job = client.fine_tuning.jobs.retrieve(id)
    assert job.error is not None
    assert (job.status, job.error.code) == ("failed", "invalid_api_key")


def with_zero_retention(site: Site, tenant: str) -> None:
    async def begin() -> None:
        async with open_tenants(site.settings) as tenants:
            await tenants.set_zero_retention(tenant, True)

    asyncio.run(begin())


def test_zero_retention_cancels_the_jobs_that_run(client: openai.OpenAI, site: Site, tenant: str) -> None:
    id = job_of(client)
    with_zero_retention(site, tenant)
    assert until(client, id, *ENDS).status == "cancelled"


def test_training_file_of_a_tenant_with_zero_retention_ends_with_its_last_job(
    client: openai.OpenAI, site: Site, tenant: str
) -> None:
    with_zero_retention(site, tenant)
    with pytest.raises(openai.PermissionDeniedError, match="zero retention"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    unread, file = (client.files.create(file=("f", jsonl(shouted())), purpose="fine-tune") for _ in range(2))
    assert unread.expires_at == unread.created_at + MIN_RETENTION, "no job may ever read it"
    first, second = (client.fine_tuning.jobs.create(model="tiny", training_file=file.id).id for _ in range(2))
    client.fine_tuning.jobs.cancel(first)
    until(client, first, *ENDS)
    left = client.files.retrieve(file.id)
    assert left.expires_at < time.time() + 1
    with pytest.raises(openai.ConflictError, match=second):  # it is kept for the other job
        client.files.delete(file.id)
    client.fine_tuning.jobs.cancel(second)
    until(client, second, *ENDS)
    assert client.files.delete(file.id).deleted


def test_another_tenants_adapter_and_one_with_a_template_are_no_start(
    client: openai.OpenAI, site: Site, tenant: str, base_dir: Path, tmp_path: Path
) -> None:
    file, adapter = sent(client, jsonl(shouted())), make_adapter(base_dir, tmp_path / "adapter")
    with Client(site.url, api_key=site.keys["acme"]) as acme, site.http() as http:
        acme.uploads.push(adapter, "lent")
        http.put(f"/v1/adapters/lent/grants/{tenant}").raise_for_status()
    with pytest.raises(openai.BadRequestError, match="another tenant's"):
        client.fine_tuning.jobs.create(model="acme/lent", training_file=file)
    with Client(site.url, api_key=site.keys[tenant]) as own:
        own.uploads.push(adapter, "mine")
        (adapter / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        own.uploads.push(adapter, "templated")
    with pytest.raises(openai.BadRequestError, match="its own chat template"):
        client.fine_tuning.jobs.create(model=f"{tenant}/templated", training_file=file)
    with pytest.raises(openai.BadRequestError, match="leave `lora` out"):
        client.fine_tuning.jobs.create(model=f"{tenant}/mine", training_file=file, extra_body={"lora": {"r": 8}})
    made = client.fine_tuning.jobs.create(model=f"{tenant}/mine", training_file=file)
    assert made.model == f"{tenant}/mine@1"
    assert made.to_dict()["lora"] is None, "the adapter's own"
    with site.http(tenant) as http:
        assert http.get("/v1/adapters/mine/revisions/1").json()["training"] is None, "it was uploaded"
    client.fine_tuning.jobs.cancel(made.id)
    until(client, made.id, "cancelled")
