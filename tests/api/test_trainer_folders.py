"""Whole folders of a training run, sent as they are: the adapter is taken, and what belongs to the run is left out."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import CONFIG, WEIGHTS, make_adapter
from site_fixture import Site

NAME = "run"
OF_THE_RUN = (
    *(f"checkpoint-2/{file}" for file in (CONFIG, WEIGHTS, "optimizer.pt", "trainer_state.json", "rng_state.pth")),
    *(f"checkpoint-2/pytorch_model_fsdp_0/{file}" for file in (".metadata", "__0_0.distcp")),
    *(f"ref/{file}" for file in (CONFIG, WEIGHTS)),  # TRL's DPO of a loaded adapter
    *(f"initial_model/{file}" for file in (CONFIG, WEIGHTS)),  # ms-swift's start with PiSSA
    *(f"converted/default/{file}" for file in (CONFIG, WEIGHTS)),
    *("completions/completions_00001.parquet", "logs/events.out.tfevents.1", "optimizer_0/__0_0.distcp"),
)


@pytest.fixture(scope="session")
def run(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with the files of its run; every file within is not the adapter's."""
    folder = make_adapter(base_dir, tmp_path_factory.mktemp("trained"), seed=8)
    for name in OF_THE_RUN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"of the run")
    return folder


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    tenant = site.enrol()
    with site.http(tenant) as client:
        yield client


def announced(folder: Path) -> dict[str, Any]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder)): {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    }


def test_folder_of_a_run_is_announced_whole_and_only_its_adapter_is_stored(client: httpx.Client, run: Path) -> None:
    opened = client.post("/v1/uploads", json={"adapter": NAME, "files": announced(run)})
    assert opened.status_code == 201, opened.text
    assert {CONFIG, WEIGHTS} <= {file["name"] for file in opened.json()["files"]}
    assert set(OF_THE_RUN) <= set(opened.json()["ignored"])


def test_folder_of_a_run_is_sent_whole_in_a_form(client: httpx.Client, run: Path) -> None:
    files = [("files", (name, (run / name).read_bytes())) for name in announced(run)]
    sent = client.post("/v1/adapters", data={"name": NAME}, files=files)
    assert sent.status_code == 201, sent.text
    stored = client.get(f"/v1/adapters/{NAME}/revisions/1").json()
    assert stored["digest"]


@pytest.mark.parametrize("how", ["announced", "form"])
def test_folder_without_an_adapter_names_the_folders_within_that_have_one(
    client: httpx.Client, run: Path, tmp_path: Path, how: str
) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=lambda folder, _: {CONFIG, WEIGHTS} if Path(folder) == run else set())
    folder = tmp_path / "run"
    if how == "announced":
        refused = client.post("/v1/uploads", json={"adapter": NAME, "files": announced(folder)})
    else:
        files = [("files", (name, (folder / name).read_bytes())) for name in announced(folder)]
        refused = client.post("/v1/adapters", data={"name": NAME}, files=files)
    assert refused.status_code == 400
    message = json.dumps(refused.json()["error"]["message"])
    for within in ("checkpoint-2", "ref", "initial_model", "converted/default"):
        assert f"'{within}'" in message
