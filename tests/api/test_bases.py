"""Two bases of one shape in one server, with real engines: an adapter is served on its own base and on no other."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import peft
import pytest
import torch
import transformers
from peft_uploads import form, make_adapter
from running_server import running
from tiny_base import make_base

from loramux.common.settings.file import Settings
from loramux.common.settings.server import RecordsSettings
from loramux.common.settings.serving import BaseSettings, EngineSettings, ModelSettings, ValidationSettings
from loramux.server.platform import open_tenants
from loramux_api.app import create_app

PROMPT = [257, *b"the same prompt"]
LENGTH = 12
ENGINE = EngineSettings(pool_bytes=1 << 22, max_num_batched_tokens=64, num_threads=1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: make_base(root / f"{name}-1b", seed=seed) for seed, name in enumerate(("amber", "birch"))}


@pytest.fixture(scope="module")
def adapter(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It fits both bases, and says that it was trained on `birch`."""
    return make_adapter(bases["birch"], tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def settings(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("server")
    served = tuple(
        BaseSettings(name=name, path=str(path), dtype="float32", engine=ENGINE) for name, path in bases.items()
    )
    return Settings(
        model=ModelSettings(path=served[0].path, served_model_name="amber"),
        bases=served,
        records=RecordsSettings(
            url=f"sqlite:///{folder}/records.sqlite3",
            blobs=f"{folder}/blobs",
            cache=f"{folder}/cache",
            pepper_file=f"{folder}/pepper",
        ),
        validation=ValidationSettings(parity=False),
    )


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    async def make_key() -> str:
        async with open_tenants(settings) as tenants:
            await tenants.create("acme")
            return (await tenants.create_key("acme"))[1]

    key = asyncio.run(make_key())
    with running(create_app(settings), "granian") as server:
        yield httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


Answer = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def answer(client: httpx.Client) -> Answer:
    def answer(model: str) -> list[int]:
        asked = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        response = client.post("/v1/completions", json={"model": model, "return_token_ids": True, **asked})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    return answer


def oracle(base: Path, adapter: Path | None = None) -> list[int]:
    """The tokens that PEFT generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    return tokens[0, len(PROMPT) :].tolist()


def push(
    client: httpx.Client, adapter: Path, name: str, claim: str | None = None, base: str | None = None
) -> httpx.Response:
    changed = {}
    if claim is not None:
        config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": claim}
        changed["config"] = json.dumps(config).encode()
    body = form(adapter, name, **changed)
    if base is not None:
        body["data"]["base_model"] = base
    return client.post("/v1/adapters", **body)


def test_two_bases_each_answer_with_their_own_weights(bases: dict[str, Path], answer: Answer) -> None:
    expected = {name: oracle(path) for name, path in bases.items()}
    assert expected["amber"] != expected["birch"]
    assert {name: answer(name) for name in bases} == expected


def test_upload_finds_its_base_by_the_name_in_its_configuration(
    client: httpx.Client, bases: dict[str, Path], adapter: Path, answer: Answer
) -> None:
    assert push(client, adapter, "found").status_code == 201
    assert answer("acme/found") == oracle(bases["birch"], adapter)
    models = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert {"amber", "birch"} <= models.keys()
    assert models["acme/found"]["parent"] == "birch"


def test_models_are_listed_in_both_directions(client: httpx.Client) -> None:
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert len(names) > 1
    for before, limit, shown in [
        (names[-1], len(names), names[:-1]), (names[-1], 1, names[-2:-1]), (names[0], 5, []), ("nothing", 5, []),
    ]:  # fmt: skip
        page = client.get("/v1/models", params={"before_id": before, "limit": limit}).json()
        assert [model["id"] for model in page["data"]] == shown
        assert page["has_more"] is (len(shown) == limit < len(names) - 1)


def test_upload_that_fits_several_bases_is_refused_with_their_names(client: httpx.Client, adapter: Path) -> None:
    refused = push(client, adapter, "unclear", claim="some/thing-else")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("base_ambiguous", "base_model")
    assert "amber, birch" in error["message"]


def test_upload_that_names_a_base_of_no_server_is_refused(client: httpx.Client, adapter: Path) -> None:
    refused = push(client, adapter, "unclear", base="cedar")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "base_model"
    assert "amber, birch" in refused.json()["error"]["message"]


def test_same_files_are_a_revision_of_each_base_that_they_are_uploaded_for(
    client: httpx.Client, bases: dict[str, Path], adapter: Path, answer: Answer, settings: Settings
) -> None:
    for base in ("amber", "birch", "amber"):
        assert push(client, adapter, "both", base=base).status_code == 201
    assert len(client.get("/v1/adapters/both/revisions").json()["data"]) == 2
    assert answer("acme/both@1") == oracle(bases["amber"], adapter)
    assert answer("acme/both@2") == oracle(bases["birch"], adapter)
    with sqlite3.connect(settings.records.url.removeprefix("sqlite:///")) as records:
        rows = records.execute("SELECT model, base_model FROM ledger_entries WHERE model LIKE 'acme/both@%'").fetchall()
    assert dict(rows) == {"acme/both@1": "amber", "acme/both@2": "birch"}
