"""kill -9 of the trainer, its server and PostgreSQL at twenty random points: every job ends and is billed once."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import sqlalchemy as sa
from postgres_server import postgres_programs, start_postgres
from server_process import LORAMUX, Child, Place, served
from training_files import jsonl, shouted

from loramux.data.records.database import Database, parse_url
from loramux.money.billing.reconcile import reconcile
from loramux.serving.tokenizer import Tokenizer
from loramux.training.encoding import Encoder
from loramux_api.training_examples import parse_example
from loramux_demo.assets import base_folder

pytestmark = [pytest.mark.server, pytest.mark.postgres, pytest.mark.slow]
SEEDS, KILLS = (38, 39), 10
"""Seeds of the runs, and kills of each."""
EXAMPLES, EPOCHS = 80, 60
LAST_ATTEMPT = 3
"""A job that this many trainers took in succession, without another checkpoint, fails by the next one."""
SECONDS = 400.0
ENDS = ("succeeded", "failed", "cancelled")
PLAN = """
[[plans]]
name = "p"
currency = "USD"

[[plans.prices]]
meter = "input_uncached"
tier = "*/training"
valid_from = 2020-01-01
price = "0.01"
"""


class Site:
    """A database, a server and a trainer, each of which can be killed, and is started again."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._postgres, self._data = start_postgres(data), data
        self.place = Place(folder, base_folder(), in_process=True, url=self._postgres.get_uri()).prepare()
        settings = "[training]\nlocal_trainer = false\ncheckpoint_seconds = 1\njobs = 2\nshare = 1\n"
        self.place.config.write_text(self.place.config.read_text() + settings)
        self.place.loramux("migrate")
        self._options = (data / "postmaster.opts").read_text().split("\n")[0].split(None, 1)[1].replace('"', "'")
        self._serving = ExitStack()
        self.server: Child
        self._trainer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.start_server()
        self.start_trainer()

    def start_server(self) -> None:
        self.server = self._serving.enter_context(served(self.place))

    def start_trainer(self) -> None:
        command = [*LORAMUX, "trainer", "--config", str(self.place.config)]
        with (self.place.folder / "trainer.log").open("a") as log:
            self._trainer = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill_server(self) -> None:
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait(30)
        self._serving.close()
        self.start_server()

    def kill_trainer(self) -> None:
        assert self._trainer is not None
        self._trainer.kill()
        self._trainer.wait(30)
        self.start_trainer()

    def kill_database(self) -> None:
        postmaster = psutil.Process(int((self._data / "postmaster.pid").read_text().split("\n")[0]))
        backends = postmaster.children()
        postmaster.kill()
        psutil.wait_procs([postmaster, *backends], timeout=30)
        owner = self._data.owner()
        as_owner = ["runuser", "-u", owner, "--"] if os.geteuid() == 0 and owner != "root" else []
        start = [*as_owner, str(postgres_programs() / "pg_ctl"), "-D", str(self._data), "-s", "-w"]
        deadline = time.monotonic() + 60
        while subprocess.run([*start, "-o", self._options, "-l", "/dev/null", "start"], check=False).returncode:
            assert time.monotonic() < deadline, "PostgreSQL does not start again"
            time.sleep(0.5)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        engine = sa.create_engine(parse_url(self.place.url or ""), poolclass=sa.NullPool)
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query))]

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.terminate()
            self._trainer.wait(30)
        self._serving.close()
        with suppress(Exception):
            self._postgres.cleanup()
        shutil.rmtree(self._data, ignore_errors=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, Path("/tmp") / f"lm-training-{os.getpid()}")
    try:
        yield site
    finally:
        site.close()


def tokens_of(examples: bytes) -> int:
    tokenizer = Tokenizer.load(base_folder())
    assert tokenizer.end_id is not None
    encoder = Encoder(tokenizer, {tokenizer.end_id}, tokenizer.end_id, 512)
    sequences = [one for line in examples.splitlines() for one in encoder.sequences(parse_example(line))]
    return sum(len(one.token_ids) for one in sequences)


def create(client: openai.OpenAI, suffix: str, examples: bytes) -> str:
    file = client.files.create(file=("train.jsonl", examples), purpose="fine-tune").id
    hyperparameters = {"n_epochs": EPOCHS, "batch_size": 8, "learning_rate_multiplier": 5.0}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return client.fine_tuning.jobs.create(model="tiny", training_file=file, suffix=suffix, method=method).id


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_of_two_tenants_survive_kills_with_one_end_and_one_bill_each(site: Site, seed: int) -> None:
    examples = jsonl(shouted(EXAMPLES))
    tokens = EPOCHS * tokens_of(examples)
    keys = {tenant: site.place.key_of(tenant) for tenant in ("acme", "globex")}
    (site.place.folder / "plan.toml").write_text(PLAN)
    site.place.loramux("price", "apply", str(site.place.folder / "plan.toml"))
    month = time.strftime("%Y-%m", time.gmtime())
    site.place.loramux("price", "assign", "p", "--tenant", "acme", "--from", month)
    site.place.loramux("budget", "set", "month", f"{tokens * 1.5 / 100:.2f}", "--tenant", "acme")
    site.start()
    jobs = {
        create(site.server.openai(keys[tenant]), suffix, examples): tenant
        for tenant, suffix in (("acme", "one"), ("acme", "two"), ("globex", "one"))
    }
    chance, killed = random.Random(seed), []
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.5, 8.0))
        states = dict(site.rows("SELECT id, trainer_attempts FROM training_jobs WHERE finished_at IS NULL"))
        assert states, f"all jobs have ended after {len(killed)} kills"
        victims = ["server"] if max(states.values()) >= LAST_ATTEMPT else ["server", "trainer", "database"]
        victim = chance.choice(victims)
        killed.append(victim)
        getattr(site, f"kill_{victim}")()
    print(f"killed: {', '.join(killed)}; unfinished at the last kill: {len(states)}")
    ended = [ended_job(site, keys[tenant], id) for id, tenant in jobs.items()]
    outcomes = {(jobs[job.id], job.status, None if job.error is None else job.error.code) for job in ended}
    assert outcomes == {
        ("acme", "succeeded", None),
        ("acme", "failed", "insufficient_quota"),
        ("globex", "succeeded", None),
    }
    assert {job.trained_tokens for job in ended if job.status == "succeeded"} == {tokens}
    check_bill(site, {job.id: tokens for job in ended if job.status == "succeeded"})
    for tenant, key in keys.items():
        with site.server.http(key) as http:
            happened = [one for one in http.get("/v1/events").json()["data"] if "fine_tuning" in one["type"]]
        assert sorted(one["data"]["id"] for one in happened) == sorted(id for id in jobs if jobs[id] == tenant)


def ended_job(site: Site, key: str, id: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while True:
        with suppress(openai.APIError):
            job = site.server.openai(key).fine_tuning.jobs.retrieve(id)
            if job.status in ENDS:
                return job
        assert time.monotonic() < deadline, (job, (site.place.folder / "trainer.log").read_text()[-2000:])
        time.sleep(0.5)


def check_bill(site: Site, tokens: dict[str, int]) -> None:
    """Each job that succeeded has its tokens in one entry of the ledger, and no other entry has tokens."""
    entries = site.rows(
        "SELECT request_id, kind, status, input_tokens, waived_input_tokens FROM ledger_entries"
        " WHERE tier LIKE '%/training' AND input_tokens + waived_input_tokens > 0"
    )
    assert {id.rpartition(".")[0]: rest for id, *rest in entries} == {
        id: ["usage", "completed", count, 0] for id, count in tokens.items()
    }
    assert len(entries) == len(tokens)
    assert site.rows("SELECT count(*) FROM requests WHERE status = 'open'") == [(0,)]

    async def drift() -> int:
        database = Database(site.place.url or "")
        try:
            return (await reconcile(database)).drift_tokens
        finally:
            await database.close()

    assert asyncio.run(drift()) == 0
