"""Trainers as jobs of a real Ray cluster, each with a GPU that Ray has chosen for it.

pytest -m slow tests/e2e/test_ray_training.py
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from server_process import LORAMUX, Place, served
from training_files import jsonl, shouted

from loramux_demo.assets import base_folder

pytest.importorskip("ray")

PACKAGES = (
    *("aiohttp", "aiohttp_cors", "colorful", "grpcio", "opencensus", "opentelemetry-exporter-prometheus"),
    *("opentelemetry-sdk", "opentelemetry-proto", "prometheus_client", "pydantic", "requests", "smart_open"),
    *("virtualenv", "py-spy"),
)
"""The packages of `ray[default]`, with which Ray takes jobs, and which the tests' Python may lack."""
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20, "include_dashboard": True, "dashboard_port": 0}
cluster = Cluster(initialize_head=True, head_node_args=node)
print("http://" + cluster.head_node.webui_url, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
INSTALL_SECONDS, COMMAND_SECONDS, SECONDS = 600, 180, 300.0
IDLE_SECONDS = 5

pytestmark = [pytest.mark.server, pytest.mark.slow]


class RayJobs:
    """The command `ray job` of a cluster."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self._address, self._environment = address, environment

    def __call__(self, verb: str, *rest: str) -> str:
        main = "from ray.scripts.scripts import main; main()"
        command = [sys.executable, "-c", main, "job", verb, "--address", self._address, *rest]
        ran = subprocess.run(
            command, check=False, capture_output=True, text=True, env=self._environment, timeout=COMMAND_SECONDS
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[RayJobs]:
    """The jobs of a cluster of one node, with two GPUs by name."""
    packages = tmp_path / "packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), *PACKAGES]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    added = {"PYTHONPATH": str(packages), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    started = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | added
    ) as cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        assert address.startswith("http://"), "the cluster has not started"
        yield RayJobs(address, os.environ | added)
        cluster.communicate(timeout=COMMAND_SECONDS)


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_two_trainers_are_ray_jobs_with_a_gpu_each_and_end_when_no_job_waits(tmp_path: Path, jobs: RayJobs) -> None:
    place = Place(tmp_path, base_folder(), in_process=True).prepare()
    place.config.write_text(place.config.read_text() + "[training]\nlocal_trainer = false\nshare = 1\n")
    place.loramux("migrate")
    key = place.key_of("acme")
    trainer = [*LORAMUX, "trainer", "--config", str(place.config), "--idle-seconds", str(IDLE_SECONDS)]
    entrypoint = f"echo card=$CUDA_VISIBLE_DEVICES; PYTHONPATH= exec {shlex.join(trainer)}"
    with served(place) as server:
        client = server.openai(key)
        made = [fine_tune(client, suffix) for suffix in ("one", "two")]
        for name in ("trainer-one", "trainer-two"):
            asked = ["--no-wait", "--submission-id", name, "--entrypoint-num-gpus", "1"]
            jobs("submit", *asked, "--", "sh", "-c", entrypoint)

        def states() -> list[str]:
            return [client.fine_tuning.jobs.retrieve(id).status for id in made]

        until(lambda: states() == ["running", "running"])
        until(lambda: states() == ["succeeded", "succeeded"])
    cards = set()
    for name in ("trainer-one", "trainer-two"):
        until(lambda name=name: "succeeded" in jobs("status", name).lower())
        cards |= {line for line in jobs("logs", name).splitlines() if line.startswith("card=")}
    assert cards == {"card=0", "card=1"}


def fine_tune(client: openai.OpenAI, suffix: str) -> str:
    file = client.files.create(file=("train.jsonl", jsonl(shouted(40))), purpose="fine-tune").id
    hyperparameters = {"n_epochs": 40, "learning_rate_multiplier": 20.0}
    return client.fine_tuning.jobs.create(
        model="tiny", training_file=file, suffix=suffix, hyperparameters=hyperparameters
    ).id
