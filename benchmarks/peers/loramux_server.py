"""loramux's server in the way that users run it: a settings file, a tenant and a key by the CLI, adapters by the API,
then `serve`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from loadgen import RETURN_TOKEN_IDS, Target
from measurements import Counters
from peers.serving import Command, Serving, SystemFailed, free_port, running
from progress import bar
from prometheus_client.parser import text_string_to_metric_families
from specs import ADAPTERS, MAX_MODEL_LEN, ModelSpec, Setup

TENANT = "bench"
UPLOAD_SECONDS = 120.0
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Loramux:
    """`loramux serve` of this checkout."""

    label = "loramux"
    serves_adapters = True
    modes = ("continuous", "static")

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[Serving]:
        """A fresh database, the server, and every adapter uploaded."""
        folder = setup.scratch / "loramux"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        port = free_port()
        settings = folder / "settings.toml"
        settings.write_text(settings_text(setup, port))
        _cli("tenant", "create", TENANT, "--config", str(settings))
        key = _cli("key", "create", "--tenant", TENANT, "--config", str(settings))["key"]
        url = f"http://127.0.0.1:{port}"
        arguments = [str(_executable()), "serve", "--config", str(settings)]
        command = Command(arguments, f"{url}/health/ready", folder / "server.log", {})
        with running(command) as (pid, start_s):
            target = Target(f"{url}/v1", key, adapter_name=f"{TENANT}/{{adapter}}", extra_body=RETURN_TOKEN_IDS)
            _upload_adapters(target, setup.spec)
            yield Serving(target, pid, start_s)

    def counters(self, serving: Serving) -> Counters:
        """Return the engine's counters so far, from /metrics."""
        answer = httpx.get(serving.target.url.removesuffix("/v1") + "/metrics", timeout=30.0).raise_for_status()
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        return Counters(
            steps=int(samples["loramux_engine_steps_total"]),
            adapter_bytes_read=int(samples["loramux_engine_adapter_bytes_read_total"]),
            weight_bytes=int(samples["loramux_engine_weight_bytes"]),
        )


def _executable() -> Path:
    return Path(sys.executable).with_name("loramux")


def _cli(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([str(_executable()), *arguments, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemFailed(f"loramux {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def settings_text(setup: Setup, port: int) -> str:
    tables: dict[str, dict[str, str | int | bool]] = {
        "model": {"path": str(setup.spec.model_path), "served_model_name": "base", "dtype": setup.dtype},
        "server": {"port": port},
        "engine": {
            "device": "cpu",
            "max_num_seqs": setup.max_num_seqs,
            "max_model_len": MAX_MODEL_LEN,
            "pool_bytes": setup.pool_bytes,
            "num_threads": setup.threads,
            "prefix_cache": False,
        },
    }
    # A JSON string or number is a TOML one too.
    lines = [[f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in t.items())] for name, t in tables.items()]
    return "\n".join(line for table in lines for line in table) + "\n"


def _upload_adapters(target: Target, spec: ModelSpec) -> None:
    headers = {"Authorization": f"Bearer {target.api_key}"}
    with httpx.Client(headers=headers, timeout=UPLOAD_SECONDS) as client, bar("adapters") as progress:
        for adapter in progress.track(ADAPTERS, description="uploading"):
            files = {name: (spec.adapter_path(adapter) / name).read_bytes() for name in PEFT_FILES}
            named = {name: (name, content) for name, content in files.items()}
            answer = client.post(f"{target.url}/adapters", data={"name": adapter}, files=named)
            if answer.status_code != httpx.codes.CREATED:
                raise SystemFailed(f"uploading {adapter}: {answer.status_code} {answer.text[:300]}")
