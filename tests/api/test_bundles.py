"""Folders as trainers save them: their bundle is shown, and serves exactly their revision."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from peft_uploads import form, make_adapter
from site_fixture import Site
from tiny_base import byte_tokenizer

from loramux_api.cli.main import main
from loramux_client import Client, UploadRejected

TEMPLATE = "{% for m in messages %}<|call|>{{ m.role }}={{ m.content }};{% endfor %}{{ bos_token }}"
SETTINGS = """
description = "Calls tools"
license = "apache-2.0"
stop = ["END"]
system_prompt = "Be terse."
tool_parser = "hermes"
"""


@pytest.fixture(scope="session")
def plain(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("plain"), seed=1)


@pytest.fixture
def trained(plain: Path, tmp_path: Path) -> Path:
    """A folder with the files that TRL saves next to an adapter, and a loramux.toml."""
    folder = tmp_path / "trained"
    shutil.copytree(plain, folder)
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "min_p": 0.05, "eos_token_id": 10}))
    (folder / "loramux.toml").write_text(SETTINGS)
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / "README.md").write_text("# mine")
    return folder


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, api_key=site.keys["acme"]) as client:
        yield client
    with site.http() as http:
        http.delete("/v1/adapters/caller", params={"undo_s": 0})


def prompt_of(site: Site, model: str, **more: object) -> list[int]:
    messages = [{"role": "user", "content": "hi <|call|>"}]
    site.openai().chat.completions.create(model=model, messages=messages, max_tokens=2, **more)
    return site.engine.requests[-1].prompt_token_ids


def test_bundle_is_part_of_the_revision_and_shown(site: Site, client: Client, trained: Path, plain: Path) -> None:
    first = client.uploads.push(plain, "caller")
    second = client.uploads.push(trained, "caller")
    assert first.digest != second.digest, "the bundle is digested"
    one, two = (int(str(upload.revision).partition("@")[2]) for upload in (first, second))
    assert client.adapters.revision("caller", one).bundle is None
    bundle = client.adapters.revision("caller", two).bundle
    assert bundle is not None
    assert (bundle.chat_template, bundle.stop, bundle.tool_parser) == (TEMPLATE, ["END"], "hermes")
    assert [(token.id, token.content) for token in bundle.added_tokens] == [(258, "<|call|>")]
    assert bundle.sampling["temperature"] == 0.25
    assert second.report is not None
    assert {"bundle", "template"} <= {check.name for check in second.report.checks}
    again = client.uploads.push(trained, "caller")
    assert again.digest == second.digest
    with site.http() as http:
        listed = http.get("/v1/adapters/caller/revisions").json()["data"]
        assert "bundle" not in listed[0], "templates are long, and lists many"
        document = http.get("/schema/openapi.json").json()
    assert "BundleObject" in json.dumps(document)


def test_bundle_serves_its_own_revision_alone(site: Site, client: Client, trained: Path, plain: Path) -> None:
    without, own = (str(client.uploads.push(folder, "caller").revision) for folder in (plain, trained))
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "hi <|call|>"}]
    wanted = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert prompt_of(site, own) == wanted
    assert wanted.count(258) == 3
    base = prompt_of(site, "tiny")
    assert prompt_of(site, without) == base
    assert 258 not in base


def test_bundle_defaults_give_way_to_the_request(site: Site, client: Client, trained: Path) -> None:
    client.uploads.push(trained, "caller")
    prompt_of(site, "acme/caller")
    own = site.engine.requests[-1]
    assert (own.sampling.temperature, own.sampling.min_p, own.eos_token_ids) == (0.25, 0.05, (10,))
    prompt_of(site, "acme/caller", temperature=0.75)
    assert site.engine.requests[-1].sampling.temperature == 0.75
    prompt_of(site, "tiny")
    assert (site.engine.requests[-1].sampling.temperature, site.engine.requests[-1].eos_token_ids) == (1.0, ())


def test_bundle_stop_strings_end_answers(site: Site, client: Client, trained: Path) -> None:
    client.uploads.push(trained, "caller")
    ask = site.openai().completions.create
    site.engine.script = lambda request: list(b"one END two")
    assert ask(model="acme/caller", prompt="x", max_tokens=20).choices[0].text == "one "
    assert ask(model="acme/caller", prompt="x", max_tokens=20, stop="two").choices[0].text == "one END "


def test_bundle_files_without_meaning_are_named_and_not_kept(site: Site, newcomer: str, trained: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors", "README.md", "training_args.bin"]
    with site.http(newcomer) as http:
        files = {name: {"size": (trained / name).stat().st_size, "sha256": "0" * 64} for name in names}
        opened = http.post("/v1/uploads", json={"adapter": "caller", "files": files}).json()
        assert opened["ignored"] == ["README.md", "training_args.bin"]
        assert [file["name"] for file in opened["files"]] == names[:2]
        http.delete(f"/v1/uploads/{opened['id']}")
        sent = form(trained, "caller")
        sent["files"] |= {name: (name, b"x") for name in ("README.md", "optimizer.pt")}
        made = http.post("/v1/adapters", **sent)
        assert made.status_code == 201, made.text
        listed = http.get("/v1/uploads").json()["data"]
        [report] = [one["report"] for one in listed if one["revision"] == f"{newcomer}/caller@1"]
    [note] = [warning for warning in report["warnings"] if warning["code"] == "files_ignored"]
    assert "README.md, optimizer.pt" in note["message"]


def test_bundle_pickled_weights_are_refused_with_the_way_out(site: Site, plain: Path) -> None:
    with site.http() as http:
        names = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
        files = {name: {"size": 10, "sha256": "0" * 64} for name in names}
        refusal = http.post("/v1/uploads", json={"adapter": "caller", "files": files})
        sent = form(plain, "caller")
        sent["files"] |= {"adapter_model.bin": ("adapter_model.bin", b"x")}
        by_form = http.post("/v1/adapters", **sent)
    for response in (refusal, by_form):
        assert response.status_code == 400
        assert "safetensors" in response.json()["error"]["message"]


def test_bundle_that_cannot_be_served_rejects_the_upload(site: Site, client: Client, trained: Path) -> None:
    (trained / "generation_config.json").write_text(json.dumps({"num_beams": 5}))
    with pytest.raises(UploadRejected, match="num_beams") as rejected:
        client.uploads.push(trained, "caller")
    assert rejected.value.param == "generation_config.json"


def test_bundle_template_that_fails_a_request_is_the_caller_s_error(site: Site, client: Client, trained: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    hostile = TEMPLATE + "{% if messages[0].content == 'now' or messages[-1].content == 'now' %}" + loop + "{% endif %}"
    (trained / "chat_template.jinja").write_text(hostile)
    client.uploads.push(trained, "caller")
    with site.http() as http:
        body = {"model": "acme/caller", "messages": [{"role": "user", "content": "now"}], "max_tokens": 1}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "chat_template_failed"
        body["messages"][0]["content"] = "later"
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_bundle_is_shown_by_the_command_line(site: Site, client: Client, trained: Path) -> None:
    revision = client.uploads.push(trained, "caller").revision
    arguments = ["adapter", "show", str(revision), "--url", site.url]
    shown = CliRunner().invoke(main, arguments, env={"LORAMUX_API_KEY": site.keys["acme"]})
    assert shown.exit_code == 0, shown.output
    assert "<|call|> (258)" in shown.output
    assert "tool parser: hermes" in shown.output


def test_bundle_of_another_tenant_is_not_shown(site: Site, client: Client, trained: Path) -> None:
    number = str(client.uploads.push(trained, "caller").revision).partition("@")[2]
    with site.http("globex") as http:
        assert http.get(f"/v1/adapters/acme%2Fcaller/revisions/{number}").status_code == 404


def test_old_revisions_keep_their_digests(site: Site, client: Client, plain: Path) -> None:
    upload = client.uploads.push(plain, "caller")
    names = ("adapter_config.json", "adapter_model.safetensors")
    lines = "".join(f"{hashlib.sha256((plain / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert upload.digest == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
