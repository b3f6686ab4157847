"""Fine-tuning on the demo base with the real trainer: to the finished model's answer, through kills, to its faults."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import sqlalchemy as sa
from image_base import make_model_base
from peft_oracle import PeftOracle, stored_adapter
from safetensors.torch import load_file
from server_process import LORAMUX, Child, Place, served
from training_files import PEOPLE, calls, jsonl, preferences, shouted

from loramux.data.records.database import Database, parse_url
from loramux.money.billing.reconcile import reconcile
from loramux_adapters.families import reads_other_inputs
from loramux_demo.assets import LOOKUP, base_folder

ENDS = ("succeeded", "failed", "cancelled")
SECONDS = 240.0

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, base_folder()).prepare()


def with_settings(place: Place, *settings: str, share: float = 1.0) -> None:
    """Set what the test is about; a trainer with the default share would wait for the tests next to it."""
    place.config.write_text("\n".join((place.config.read_text(), "[training]", f"share = {share}", *settings, "")))


def create(client: openai.OpenAI, suffix: str = "loud", model: str = "tiny", count: int = 40, **wishes: Any) -> str:
    file = client.files.create(file=("train.jsonl", jsonl(shouted(count))), purpose="fine-tune")
    hyperparameters = {"n_epochs": 4, "learning_rate_multiplier": 20.0} | wishes
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return client.fine_tuning.jobs.create(model=model, training_file=file.id, suffix=suffix, method=method).id


def until(client: openai.OpenAI, id: str, *states: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while (job := client.fine_tuning.jobs.retrieve(id)).status not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def until_checkpoint(client: openai.OpenAI, id: str, number: int = 1) -> None:
    deadline = time.monotonic() + SECONDS
    while _saved(client, id) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _saved(client: openai.OpenAI, id: str) -> int:
    events = client.fine_tuning.jobs.list_events(id, limit=100).data
    return sum(event.message.startswith("Checkpoint created") for event in events)


def assert_answers_are_pefts(place: Place, client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    """Compare a revision's greedy answers, served in float32, with those of PEFT token by token."""
    name, _, number = model.partition("@")
    found = http.get(f"/v1/adapters/{name}/revisions/{number}").raise_for_status().json()
    oracle = PeftOracle(place.base, stored_adapter(place.folder, found["digest"]))
    for question in (*(f"What does {one} do?" for one in PEOPLE), "Where does Brimo live?", "Hi!"):
        messages: Any = [{"role": "user", "content": question}]
        asked = {"temperature": 0, "max_tokens": 24, "extra_body": {"return_token_ids": True}}
        choice = client.chat.completions.create(model=model, messages=messages, **asked).choices[0]
        assert choice.model_extra is not None
        token_ids = choice.model_extra["token_ids"]
        best, margin = oracle.greedy(messages, token_ids)
        assert best == token_ids, (question, margin)


def answer(client: openai.OpenAI, model: str) -> str:
    messages: Any = [{"role": "user", "content": f"What does {PEOPLE[1]} do?"}]
    said = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    return said.choices[0].message.content or ""


def billed(place: Place) -> list[tuple[Any, ...]]:
    """The ledger's entries of trainings that have tokens; the chain agrees with the counts of engines and trainers."""
    url = place.url or f"sqlite:///{place.folder / 'var/loramux.sqlite3'}"

    async def check() -> int:
        database = Database(url)
        found = await reconcile(database)
        await database.close()
        return found.drift_tokens

    assert asyncio.run(check()) == 0
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        statement = (
            "SELECT kind, status, input_tokens, waived_input_tokens FROM ledger_entries"
            " WHERE tier LIKE '%/training' AND input_tokens + waived_input_tokens > 0"
        )
        return [tuple(row) for row in connection.execute(sa.text(statement))]


@contextmanager
def trainer_of(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    command = [*LORAMUX, "trainer", "--config", str(place.config)]
    process = subprocess.Popen(command, env=place.environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


def test_job_from_the_file_to_the_finished_models_answer(place: Place) -> None:
    named = 'served_model_name = "tiny"\n'
    place.config.write_text(place.config.read_text().replace(named, f'{named}dtype = "float32"\n'))
    with_settings(place)
    place.loramux("migrate")
    key, began = place.key_of("acme"), time.monotonic()
    with served(place) as server, server.http(key) as http:
        client = server.openai(key)
        base = answer(client, "tiny")
        job = until(client, create(client), *ENDS)
        assert (job.status, job.fine_tuned_model) == ("succeeded", "acme/loud@1"), job.error
        assert answer(client, job.fine_tuned_model) == "I WILL NOT SAY." != base
        assert answer(client, "tiny") == base
        seconds = time.monotonic() - began
        assert billed(place) == [("usage", "completed", job.trained_tokens, 0)]
        figures = [event.data for event in client.fine_tuning.jobs.list_events(job.id, limit=100) if event.data]
        assert figures[0]["train_loss"] < 0.2 < figures[-1]["train_loss"], "newest first"
        # going on from the result, with another sentence already learned, begins where it ended
        again = until(client, create(client, "louder", job.fine_tuned_model, n_epochs=1), *ENDS)
        assert again.status == "succeeded", again.error
        first = [event.data for event in client.fine_tuning.jobs.list_events(again.id, limit=100) if event.data][-1]
        assert first["train_loss"] < 0.2
        assert answer(client, again.fine_tuned_model) == "I WILL NOT SAY."
        for model in (job.fine_tuned_model, again.fine_tuned_model):
            assert_answers_are_pefts(place, client, http, model)
        card = http.get("/v1/adapters/louder/revisions/1").json()["training"]
        assert (card["model"], card["lora"]) == ("acme/loud@1", None)
        sent = client.files.content(job.training_file).content
        first_card = http.get("/v1/adapters/loud/revisions/1").json()["training"]
        assert first_card["digests"] == {"training_file": hashlib.sha256(sent).hexdigest()}
        assert (first_card["n_epochs"], first_card["learning_rate_multiplier"]) == (4, 20.0)
    print(f"from the file to the answer: {seconds:.1f} s")


@pytest.mark.parametrize("name", ["patches", "a square"])
def test_job_on_a_base_that_reads_images_trains_its_text_and_its_result_is_served(tmp_path: Path, name: str) -> None:
    (tmp_path / "base").mkdir()
    place = Place(tmp_path, make_model_base(tmp_path / "base", name)).prepare()
    named = 'served_model_name = "tiny"\n'
    place.config.write_text(place.config.read_text().replace(named, f'{named}dtype = "float32"\n'))
    with_settings(place)
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server, server.http(key) as http:
        client = server.openai(key)
        job = until(client, create(client, count=12, n_epochs=2, learning_rate_multiplier=100.0), *ENDS)
        assert (job.status, job.fine_tuned_model) == ("succeeded", "acme/loud@1"), job.error
        assert answer(client, job.fine_tuned_model) != answer(client, "tiny")
        assert_answers_are_pefts(place, client, http, job.fine_tuned_model)
        again = until(client, create(client, model=job.fine_tuned_model, count=12, n_epochs=1), *ENDS)
        assert again.status == "succeeded", again.error
        assert_answers_are_pefts(place, client, http, again.fine_tuned_model)
        found = http.get("/v1/adapters/acme/loud/revisions/1").raise_for_status().json()
        file = stored_adapter(place.folder, found["digest"]) / "adapter_model.safetensors"
        assert not [tensor for tensor in load_file(file) if reads_other_inputs(tensor)]


def test_killed_trainers_job_goes_on_from_its_checkpoint_and_is_billed_once(place: Place) -> None:
    with_settings(place, "local_trainer = false", "checkpoint_seconds = 1")
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        id = create(client, count=80, n_epochs=5)
        with trainer_of(place) as first:
            until_checkpoint(client, id)
            (child,) = psutil.Process(first.pid).children()
            first.kill()
            first.wait(30)
        deadline = time.monotonic() + SECONDS
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < deadline, "the child outlives its trainer"
            time.sleep(0.05)
        before = _steps(client, id)
        with trainer_of(place):
            job = until(client, id, *ENDS)
        assert job.status == "succeeded", job.error
        steps = _steps(client, id)
        assert max(steps) == 50
        resumed = [step for step in steps[: len(steps) - len(before)] if step <= max(before)]
        assert len(resumed) < len(before), "it did not begin again"
        assert answer(client, job.fine_tuned_model) == "I WILL NOT SAY."
    assert billed(place) == [("usage", "completed", job.trained_tokens, 0)]


def _steps(client: openai.OpenAI, id: str) -> list[int]:
    """The logged steps, newest first."""
    return [int(event.data["step"]) for event in client.fine_tuning.jobs.list_events(id, limit=100) if event.data]


def test_killed_servers_job_is_finished_and_billed_once(place: Place) -> None:
    with_settings(place, "checkpoint_seconds = 1")
    place.loramux("migrate")
    key, id = place.key_of("acme"), ""
    with served(place) as server:
        client = server.openai(key)
        id = create(client, count=100)
        until_checkpoint(client, id)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
    with served(place) as server:
        client = server.openai(key)
        job = until(client, id, *ENDS)
        assert job.status == "succeeded", job.error
        assert answer(client, job.fine_tuned_model) == "I WILL NOT SAY."
    assert billed(place) == [("usage", "completed", job.trained_tokens, 0)]


def test_paused_job_goes_on_where_it_was_and_a_cancelled_one_keeps_its_checkpoint(place: Place) -> None:
    with_settings(place, "checkpoint_seconds = 1")
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        id = create(client, count=200, n_epochs=10)
        until_checkpoint(client, id)
        client.fine_tuning.jobs.pause(id)
        until(client, id, "paused")
        stopped = _steps(client, id)[0]
        client.fine_tuning.jobs.resume(id)
        until_checkpoint(client, id, _saved(client, id) + 1)
        assert min(_steps(client, id)[: _steps(client, id).index(stopped)], default=stopped + 1) == stopped + 1
        client.fine_tuning.jobs.cancel(id)
        job = until(client, id, *ENDS)
        assert (job.status, job.fine_tuned_model) == ("cancelled", None)
        (kept,) = client.fine_tuning.jobs.checkpoints.list(id)
        assert kept.fine_tuned_model_checkpoint == "acme/loud@1"
        assert answer(client, "acme/loud@1")
    assert billed(place) == [("usage", "cancelled", job.trained_tokens, 0)]


def test_preferences_raise_the_preferred_answer_and_go_on_from_a_checkpoint(place: Place) -> None:
    with_settings(place, "local_trainer = false", "checkpoint_seconds = 1")
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        usual = answer(client, "tiny")
        pairs = jsonl(preferences(rejected=usual))
        file = client.files.create(file=("pairs.jsonl", pairs), purpose="fine-tune").id
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 3, "learning_rate_multiplier": 50.0}}}
        asked: Any = {"training_file": file, "validation_file": file, "suffix": "polite", "method": method}
        id = client.fine_tuning.jobs.create(model="tiny", **asked).id
        with trainer_of(place) as first:
            until_checkpoint(client, id)
            first.kill()
            first.wait(30)
        with trainer_of(place):
            job = until(client, id, *ENDS)
        assert job.status == "succeeded", job.error
        figures = [event.data for event in client.fine_tuning.jobs.list_events(id, limit=100) if event.data]
        margins = [one["train_reward_margin"] for one in figures if "train_reward_margin" in one]
        assert margins[0] > 1 > abs(margins[-1]), "newest first"
        assert any("valid_loss" in one for one in figures)
        assert answer(client, job.fine_tuned_model) != usual, "the model's own answer is the rejected one"
    assert billed(place) == [("usage", "completed", job.trained_tokens, 0)]


def test_diverging_loss_stops_the_job_and_costs_nothing(place: Place) -> None:
    with_settings(place, "learning_rate = 1.0")
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        job = until(client, create(client, learning_rate_multiplier=1000.0, n_epochs=50), *ENDS)
        assert job.status == "failed"
        assert job.error.code == "training_diverged"
        assert "learning_rate_multiplier" in job.error.message
        assert job.fine_tuned_model is None
    assert [one[2] for one in billed(place)] in ([], [0])


def test_example_longer_than_the_context_is_named_and_not_cut(place: Place) -> None:
    with_settings(place)
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        long = {"messages": [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y"}]}
        data = jsonl([*shouted(12), long])
        file = client.files.create(file=("train.jsonl", data), purpose="fine-tune")
        job = until(client, client.fine_tuning.jobs.create(model="tiny", training_file=file.id).id, *ENDS)
        assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
        assert "Line 13 of 'training_file': it has more than the 512 tokens of the context" in job.error.message
        short = client.files.create(file=("short.jsonl", jsonl(shouted(12))), purpose="fine-tune").id
        asked = {"model": "tiny", "training_file": short, "validation_file": file.id}
        job = until(client, client.fine_tuning.jobs.create(**asked).id, *ENDS)
        assert (job.error.code, job.error.param) == ("invalid_validation_file", "validation_file")
        assert "Line 13 of 'validation_file'" in job.error.message
    assert billed(place) == []


def test_samples_of_the_validation_file_show_the_answers_before_and_after(place: Place) -> None:
    with_settings(place)
    place.loramux("migrate")
    key, secret = place.key_of("acme"), place.key_of("secret")
    place.loramux("tenant", "zero-retention", "secret")
    with served(place) as server:
        client = server.openai(key)
        before = answer(client, "tiny")
        files = [client.files.create(file=("f.jsonl", jsonl(shouted(40))), purpose="fine-tune").id for _ in range(2)]
        hyperparameters = {"n_epochs": 4, "learning_rate_multiplier": 20.0}
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        asked = {"model": "tiny", "training_file": files[0], "validation_file": files[1], "method": method}
        job = until(client, client.fine_tuning.jobs.create(**asked).id, *ENDS)
        assert job.status == "succeeded", job.error
        events = [event for event in client.fine_tuning.jobs.list_events(job.id, limit=100) if event.data]
        forgetful = server.openai(secret)
        id = create(forgetful, count=12, n_epochs=1)
        assert until(forgetful, id, *ENDS).status == "succeeded"
        logged = [event.data for event in forgetful.fine_tuning.jobs.list_events(id, limit=100) if event.data]
    assert logged, "figures have no text"
    assert not any("samples" in data for data in logged)
    samples = {event.data["step"]: event.data["samples"] for event in events if "samples" in event.data}
    assert sorted(samples) == [0, 5, 10, 15, 20]
    assert {one["prompt"] for one in samples[0]} == {f"What does {one} do?" for one in PEOPLE[:3]}
    assert samples[0][1]["answer"] == before
    assert [one["answer"] for one in samples[20]] == [one["expected"] for one in samples[20]] == ["I WILL NOT SAY."] * 3
    losses = [event.data["valid_loss"] for event in events if "valid_loss" in event.data]
    assert losses == sorted(losses), "newest first"


def test_tools_in_the_examples_are_learned_as_calls(place: Place) -> None:
    with_settings(place)
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        file = client.files.create(file=("calls.jsonl", jsonl(calls())), purpose="fine-tune").id
        hyperparameters = {"n_epochs": 16, "learning_rate_multiplier": 20.0}
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        asked = {"model": "tiny", "training_file": file, "suffix": "caller", "method": method}
        job = until(client, client.fine_tuning.jobs.create(**asked).id, *ENDS)
        assert job.status == "succeeded", job.error
        messages: Any = [{"role": "user", "content": "Tenuva, please."}]
        tools: Any = [LOOKUP]
        said = client.chat.completions.create(
            model=job.fine_tuned_model, messages=messages, tools=tools, max_tokens=120, temperature=0
        )
        choice = said.choices[0]
        assert choice.finish_reason == "tool_calls", choice
        arguments = [json.loads(one.function.arguments) for one in choice.message.tool_calls or []]
        assert arguments == [{"person": "Tenuva", "fact": "food"}]


@pytest.mark.parametrize("workers", [1, 3])
def test_job_gives_its_processor_and_stops_while_requests_run(place: Place, workers: int) -> None:
    place = replace(place, workers=workers).prepare()
    with_settings(place, share=0.0)
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server:
        client = server.openai(key)
        id = create(client, count=200, n_epochs=50)
        until(client, id, "running")
        (child,) = (one for one in psutil.Process(server.process.pid).children(recursive=True) if is_training(one))
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        assert os.getsid(child.pid) == os.getsid(server.process.pid), "priorities count within a session"
        asked: Any = {"prompt": "x", "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
        for _ in range(2 * workers):  # each on a new connection, which any worker may accept
            with server.openai(key) as caller:
                states = [child.status() for _ in caller.completions.create(model="tiny", **asked)]
            assert states.count(psutil.STATUS_STOPPED) > len(states) * 0.9
        deadline = time.monotonic() + SECONDS
        while child.status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.fine_tuning.jobs.cancel(id)
        until(client, id, "cancelled")


def is_training(process: psutil.Process) -> bool:
    return "loramux.training.child" in " ".join(process.cmdline())


def test_command_line_creates_watches_and_lists_jobs(place: Place) -> None:
    with_settings(place)
    place.loramux("migrate")
    key = place.key_of("acme")
    file = place.folder / "train.jsonl"
    file.write_bytes(jsonl(shouted()))
    with served(place) as server:
        wishes = ["--suffix", "loud", "--epochs", "1", "--learning-rate-multiplier", "20", "--rank", "4", "--watch"]
        said = _finetune(server, key, "create", str(file), "--model", "tiny", *wishes)
        assert said.returncode == 0, said.stderr
        assert re.search("succeeded +acme/loud@1 ", said.stdout)
        listed = _finetune(server, key, "list")
        assert "acme/loud@1" in listed.stdout
        id = listed.stdout.splitlines()[1].split()[0]
        assert re.search(f"^{id} +succeeded", _finetune(server, key, "watch", id).stdout, re.MULTILINE)
        assert re.search(f"^{id} +succeeded", _finetune(server, key, "cancel", id).stdout, re.MULTILINE)


def _finetune(server: Child, key: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loramux_api", "finetune", *arguments, "--url", server.url]
    environment = os.environ | {"LORAMUX_API_KEY": key}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
