"""The command line: what a newcomer reads, what a script reads, and how it refuses."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from peft_uploads import make_adapter
from site_fixture import Site

from loramux.common.settings.file import load_settings
from loramux_api.cli import remote
from loramux_api.cli.common import table
from loramux_api.cli.main import COMMANDS, main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config(base_dir: Path, tmp_path: Path) -> Path:
    file = tmp_path / "loramux.toml"
    file.write_text(f'[model]\npath = "{base_dir}"\nserved_model_name = "tiny"\n[server]\nport = 8765\n')
    return file


def loramux(*arguments: str, code: int = 0, **environment: str) -> Result:
    environment = {"LORAMUX_API_KEY": "", "LORAMUX_CONFIG": "", "LORAMUX_URL": ""} | environment
    environment.setdefault("LORAMUX_DATA", os.environ.get("LORAMUX_DATA", "/nonexistent"))
    result = CliRunner().invoke(main, arguments, env=environment)
    assert result.exit_code == code, result.output
    return result


def read(*arguments: str) -> Any:
    """Return the command's output with --json, which is one document and nothing else."""
    result = loramux(*arguments, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def commands(group: click.Command = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(group, click.Group):
        return [path]
    context = click.Context(group)
    inner = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    return [leaf for name, command in inner if command for leaf in commands(command, (*path, name))]


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_command_help_has_an_example(path: tuple[str, ...]) -> None:
    shown = loramux(*path, "--help").stdout
    assert f"loramux {' '.join(path)}" in shown.split("Example:")[1]
    assert "--json" in shown


def options(command: click.Command = main, path: str = "loramux") -> list[tuple[str, click.Option]]:
    found = [(f"{path} {one.opts[0]}", one) for one in command.params if isinstance(one, click.Option)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found += options(inner, f"{path} {name}")
    return found


def test_every_option_is_explained() -> None:
    unexplained = [path for path, option in options() if not option.hidden and len((option.help or "").split()) < 2]
    assert unexplained == []


@pytest.mark.parametrize("path", [(), *sorted({path[:1] for path in commands() if len(path) > 1})], ids=" ".join)
def test_help_of_a_group_has_whole_sentences(path: tuple[str, ...]) -> None:
    listed = loramux(*path, "--help").stdout.split("Commands:")[1]
    assert "..." not in listed


def test_names_of_limits_are_whole_words_in_help_and_refusal() -> None:
    for path in (("limit", "set"), ("limit", "rm"), ("limit", "set-tier")):
        assert "  batch_concurrent_requests\n" in loramux(*path, "--help").stdout
    refused = loramux("limit", "set", "file_byte", "1", "--tenant", "acme", code=2).stderr
    assert "limit set [OPTIONS] NAME VALUE" in refused
    assert "'file_byte' is not one of 'requests_per_minute'" in refused


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ('host = "0.0.0.0"\nport = 81\n', "http://127.0.0.1:81"),
        ('host = "::"\nport = 81\n', "http://[::1]:81"),
        ('host = "llm.example"\nport = 81\ntls_certificate = "c"\ntls_key = "k"\n', "https://llm.example:81"),
    ],
)
def test_commands_call_the_server_at_an_address_of_its_settings(tmp_path: Path, server: str, address: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'[model]\npath = "base"\nserved_model_name = "tiny"\n[server]\n{server}')
    assert remote.address_of(file) == address


def test_table_has_heads_above_aligned_columns() -> None:
    assert table(("id", "state"), [("a", None), ("long", "x")]) == "id    state\na     -\nlong  x"
    assert table(("id",), []) == ""


WITHOUT_SERVER = {("demo",), ("init",), ("simulate",), ("plan",)}


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_command_with_a_server_accepts_config(path: tuple[str, ...]) -> None:
    assert path in WITHOUT_SERVER or "--config" in loramux(*path, "--help").stdout


def test_help_lists_every_command() -> None:
    shown = loramux("--help").stdout
    assert all(name in shown and meaning in shown for name, (_, meaning) in COMMANDS.items())


def test_tenant_and_key_commands_start_from_an_empty_folder(config: Path) -> None:
    where = ("--config", str(config))
    made = read("tenant", "create", "acme", *where)
    assert made["name"] == "acme"
    assert [one["id"] for one in read("tenant", "ls", *where)] == [made["id"]]
    key = read("key", "create", "--tenant", "acme", "--name", "ci", "--scope", "usage", *where)
    assert key["key"].startswith("sk-lm-")
    assert key["scopes"] == ["usage"]
    listed = read("key", "ls", "--tenant", "acme", *where)
    assert [(one["name"], one["hint"]) for one in listed] == [("ci", key["key"][-4:])]
    assert key["key"] not in json.dumps(listed)
    assert read("key", "revoke", key["id"], *where)["revoked_at"]
    assert "revoked" in loramux("key", "ls", "--tenant", "acme", *where).stdout


def test_suggested_command_names_the_settings_file_only_if_the_command_would_not_find_it(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(config, tmp_path / "data/loramux.toml")
    named = loramux("tenant", "create", "acme", "--config", str(config)).stdout
    assert named.split("Next: ")[1].split() == f"loramux key create --tenant acme --config {config}".split()
    found = loramux("tenant", "create", "acme", LORAMUX_DATA=str(tmp_path / "data")).stdout
    assert found.split("Next: ")[1].split() == ["loramux", "key", "create", "--tenant", "acme"]


def test_operator_commands_work_without_a_server(config: Path) -> None:
    where = ("--config", str(config))
    assert read("tier", "put", "gold", "--class", "interactive", "--weight", "4", *where)["weight"] == 4
    assert read("tenant", "create", "acme", "--tier", "gold", *where)["tier"] == "gold"
    assert read("tenant", "move", "acme", "--tier", "batch", *where)["tier"] == "batch"
    assert read("tier", "rm", "gold", *where)["name"] == "gold"
    assert {tier["name"] for tier in read("tier", "ls", *where)} == {"interactive", "standard", "batch"}
    assert read("tenant", "suspend", "acme", *where)["suspended_at"]
    assert read("tenant", "resume", "acme", *where)["suspended_at"] is None
    of_acme = ("--tenant", "acme", *where)
    web = read("project", "create", "web", *of_acme)
    assert [one["name"] for one in read("project", "ls", *of_acme)] == ["default", "web"]
    made = read("key", "create", "--project", "web", "--days", "3", "--model", "tiny", *of_acme)
    rotated = read("key", "rotate", made["id"], "--overlap", "60", *of_acme)
    assert [one["replaced_by"] for one in read("key", "ls", *of_acme)] == [rotated["id"], None]
    assert read("project", "archive", "web", *of_acme)["archived_at"]
    person = ("--issuer", "https://id.example", "--subject", "alice", "--role", "owner")
    member = read("member", "add", *person, *of_acme)
    assert loramux("member", "role", member["id"], "--role", "viewer", *of_acme, code=1).stderr.count("last owner") == 1
    assert [one["role"] for one in read("member", "ls", *of_acme)] == ["owner"]
    assert read("limit", "set", "concurrent_requests", "3", *of_acme)["value"] == 3
    assert read("limit", "set", "concurrent_requests", "2", "--subject", web["id"], *of_acme)["subject"] == web["id"]
    assert read("limit", "set-tier", "adapters", "5", "--tier", "batch", *where)["value"] == 5
    assert {one["name"] for one in read("limit", "ls", *of_acme)} == {"concurrent_requests", "adapters"}
    assert read("limit", "rm", "concurrent_requests", *of_acme)["name"] == "concurrent_requests"
    assert "no price plan" in loramux("budget", "set", "month", "1", *of_acme, code=1).stderr
    read("price", "apply", str(CONFIGS / "prices" / "standard.toml"), *where)
    read("price", "assign", "standard", *of_acme, "--from", datetime.now(UTC).strftime("%Y-%m"))
    assert read("budget", "set", "month", "12.000000001", *of_acme)["amount"] == 12_000_000_001
    assert read("budget", "ls", *of_acme)[0]["spent"] == 0
    assert read("budget", "rm", "month", *of_acme)["period"] == "month"
    log = read("audit", "ls", *of_acme)
    assert log[0]["action"] == "budget.remove"
    assert (
        read("audit", "ls", "--limit", "1", "--before", str(log[0]["sequence"]), *of_acme)[0]["action"] == "budget.put"
    )
    for amount in ("x", "1.2.3", "1.0000000001", "-1", ""):
        assert loramux("budget", "set", "day", amount, *of_acme, code=2)


def test_init_finds_a_model_and_writes_valid_settings(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base_dir, tmp_path / "models" / "My Model")
    make_adapter(base_dir, tmp_path / "models" / "an-adapter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LORAMUX_DATA", str(tmp_path / "data"))
    done = read("init")
    assert (done["config"], done["model"]) == ("loramux.toml", str(tmp_path / "models" / "My Model"))
    settings = load_settings(tmp_path / "loramux.toml")
    assert (settings.model.path, settings.model.served_model_name) == (done["model"], "my-model")
    assert settings.records.url == f"sqlite:///{tmp_path}/data/loramux.sqlite3"
    assert done["data"] == str(tmp_path / "data")
    assert [command.split()[1] for command in done["next"]] == ["serve", "tenant", "key"]
    for command in done["next"][1:]:
        loramux(*command.split()[1:])
    assert "--force" in loramux("init", code=1).stderr
    (tmp_path / "hf" / "hub" / "models--org--Tiny-1B" / "snapshots").mkdir(parents=True)
    shutil.copytree(base_dir, tmp_path / "hf" / "hub" / "models--org--Tiny-1B" / "snapshots" / "0123abc")
    shutil.rmtree(tmp_path / "models")
    assert read("init", "--force")["served_model_name"] == "tiny-1b"


def test_init_without_a_model_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "set model.path" in loramux("init").stdout
    assert "does not exist" in loramux("serve", "--config", "loramux.toml", code=1).stderr
    (tmp_path / "empty").mkdir()
    assert "no config.json" in loramux("init", "--force", "--model", "empty", code=1).stderr


def test_key_create_prints_only_the_key_on_stdout(config: Path) -> None:
    loramux("tenant", "create", "acme", "--config", str(config))
    result = loramux("key", "create", "--tenant", "acme", LORAMUX_CONFIG=str(config))
    assert result.stdout.startswith("sk-lm-")
    assert len(result.stdout.split()) == 1
    assert "not shown again" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tenant", "create", "Acme Inc"), "a tenant's name is 1 to 63"),
        (("key", "create", "--tenant", "nobody"), "there is no tenant 'nobody'"),
        (("key", "ls", "--tenant", "nobody"), "there is no tenant 'nobody'"),
        (("key", "revoke", "key_x"), "there is no key 'key_x'"),
        (("adapter", "push", "{here}", "--key", "sk-lm-x"), "adapter_config.json"),
        (("adapter", "ls", "--key", "sk-lm-x"), "no loramux server answers at http://127.0.0.1:8765"),
    ],
)
def test_refusal_is_one_sentence_on_stderr(config: Path, arguments: tuple[str, ...], told: str) -> None:
    given = [argument.format(here=config.parent) for argument in arguments]
    result = loramux(*given, "--config", str(config), code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_tenant_create_refuses_a_taken_name(config: Path) -> None:
    loramux("tenant", "create", "acme", "--config", str(config))
    assert "already" in loramux("tenant", "create", "acme", "--config", str(config), code=1).stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "does not exist"),
        ("[model", "is not valid TOML"),
        ("[model]\npath = 'x'", "served_model_name"),
        ("[model]\npath = 'x'\nserved_model_name = 'y'\n[server]\nport = 99999", "server.port"),
        ("[model]\npath = 'x'\nserved_model_name = 'y'\n[records]\nurl = 'mysql://x'", "sqlite:///PATH or postgresql"),
    ],
)
def test_settings_error_names_the_field(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "loramux.toml"
    if text is not None:
        file.write_text(text)
    assert told in loramux("migrate", "--config", str(file), code=1).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("nonsense",),
        ("tenant", "create"),
        ("key", "create", "--tenant", "a", "--scope", "root", "--config", "x"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...]) -> None:
    assert "Usage:" in loramux(*arguments, code=2).stderr


def test_migrate_twice_changes_nothing(config: Path) -> None:
    first = read("migrate", "--config", str(config))
    assert first["revision"]
    assert read("migrate", "--config", str(config)) == first


@pytest.fixture(scope="session")
def folders(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two revisions of an adapter."""
    return [make_adapter(base_dir, tmp_path_factory.mktemp("cli") / "my-adapter", seed=seed) for seed in (41, 42)]


def test_adapter_commands_from_push_to_undelete(site: Site, folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "key").write_text(site.keys["globex"] + "\n")
    at = ("--url", f"{site.url}/v1", "--key-file", str(tmp_path / "key"))
    first = read("adapter", "push", str(folders[0]), *at)
    assert (first["revision"], first["state"]) == ("globex/my-adapter@1", "ready")
    told = loramux("adapter", "push", str(folders[0]), "--name", "my-adapter", *at).stdout
    assert first["digest"] in told
    assert "ok  " in told
    assert "rank 4" in told
    assert "no effect" not in told
    assert "no effect" in loramux("adapter", "push", str(folders[0]), "--name", "my-adapter", "-v", *at).stdout
    second = loramux("adapter", "push", str(folders[1]), "--name", "my-adapter", "--no-promote", *at).stdout
    assert "loramux adapter promote globex/my-adapter@2" in second
    assert loramux("adapter", "ls", *at).stdout.count("globex/my-adapter@1") == 1
    assert "@1 100%" in loramux("adapter", "ls", *at).stdout
    absent = loramux("adapter", "canary", "my-adapter@9", "5", *at, code=1).stderr
    assert (
        "has no revision 9; see `loramux adapter show globex/my-adapter` or GET /v1/adapters/globex/my-adapter"
        in absent
    )
    assert "5% of" in loramux("adapter", "canary", "my-adapter@2", "5", *at).stdout
    assert "@1 95%, @2 5%" in loramux("adapter", "ls", *at).stdout
    shown = loramux("adapter", "show", "my-adapter", *at).stdout
    assert ":default -> @1 95%, @2 5%" in shown
    assert "globex/my-adapter:default is now @2." in loramux("adapter", "promote", "my-adapter@2", *at).stdout
    assert read("adapter", "show", "my-adapter", *at)["adapter"]["revision"] == 2
    assert "is @1, @2 again" in loramux("adapter", "rollback", "my-adapter", *at).stdout
    assert read("adapter", "rollback", "my-adapter", "--to", "1", *at)["revision"] == 1
    history = loramux("adapter", "history", "my-adapter", *at).stdout.splitlines()
    assert history[0].split() == ["version", "time", "targets", "by", "restores"]
    assert history[1].split()[-1] == "1"
    assert "@1 95%, @2 5%" in history[-2]
    assert [one["version"] for one in read("adapter", "history", "my-adapter", *at)] == [5, 4, 3, 2, 1]
    assert read("adapter", "pin", "my-adapter@1", *at)["pin"]
    assert "pinned" in loramux("adapter", "show", "my-adapter", *at).stdout
    assert read("adapter", "pin", "my-adapter@1", "--off", *at)["pin"] is None
    assert read("adapter", "grant", "my-adapter", "acme", *at)["tenant"] == "acme"
    assert "may be called by acme" in loramux("adapter", "show", "my-adapter", *at).stdout
    assert "no longer" in loramux("adapter", "grant", "my-adapter", "acme", "--off", *at).stdout
    site.openai("globex").completions.create(model="my-adapter", prompt="x")
    assert "undelete my-adapter@2" in loramux("adapter", "rm", "my-adapter@2", *at).stdout
    loramux("adapter", "undelete", "my-adapter@2", *at)
    assert read("adapter", "rm", "my-adapter", *at)["deleted"]
    undeleted = loramux("adapter", "undelete", "my-adapter", *at).stdout
    assert "my-adapter is restored; globex/my-adapter is @1." in undeleted
    lines = loramux("adapter", "logs", "my-adapter", *at).stdout.splitlines()
    assert first["digest"] in next(line for line in lines if "request" in line and "settled" in line)
    assert [line for line in lines if "retired" in line and "@2" in line]
    told = [line.split(None, 2)[2] for line in lines if "->" in line]
    assert [" ".join(line.split()) for line in told] == [
        "canary.started globex/my-adapter:default @1 100 -> @1 95, @2 5",
        "alias.promoted globex/my-adapter:default @1 95, @2 5 -> @2 100",
        "alias.rolled_back globex/my-adapter:default @2 100 -> @1 95, @2 5",
        "alias.rolled_back globex/my-adapter:default @1 95, @2 5 -> @1 100",
    ]
    assert len([line for line in lines if "restored" in line]) == 3
    assert read("adapter", "logs", "my-adapter", "--limit", "1", *at)["requests"][0]["model"] == "globex/my-adapter@1"
    loramux("adapter", "rm", "my-adapter", *at)


def test_adapter_training_lists_the_versions_that_a_trainer_pushed(site: Site, folders: list[Path]) -> None:
    lab = site.enrol(("push",))
    at = ("--url", site.url, "--key", site.keys[lab])
    assert "No version is live" in loramux("adapter", "training", *at).stdout
    for folder in folders:
        files = {
            one: (one, (folder / one).read_bytes()) for one in ("adapter_config.json", "adapter_model.safetensors")
        }
        with site.http(lab) as http:
            pushed = {"lora_name": "policy", "load_inplace": "true"}
            http.post("/v1/load_lora_adapter", data=pushed, files=files).raise_for_status()
    assert [one["id"] for one in read("adapter", "training", *at)] == [f"{lab}/policy@2", f"{lab}/policy@1"]
    heads, first = loramux("adapter", "training", *at).stdout.splitlines()[:2]
    assert heads.startswith("version ")
    assert first.split()[:3] == [f"{lab}/policy@2", "tiny", "4"]


def test_adapter_canary_without_another_revision_is_refused(site: Site, folders: list[Path]) -> None:
    at = ("--url", site.url, "--key", site.keys["acme"])
    loramux("adapter", "push", str(folders[0]), "--name", "lone", *at)
    assert "points at no other revision" in loramux("adapter", "canary", "lone@1", "5", *at, code=1).stderr
    assert "support@3" in loramux("adapter", "promote", "lone", *at, code=2).stderr
    assert "LORAMUX_API_KEY" in loramux("adapter", "ls", "--url", site.url, code=2).stderr
    loramux("adapter", "rm", "lone", *at)
    assert "40 digits" in loramux("adapter", "import", "hf:a/b@main", "--name", "x", *at, code=2).stderr
    told = loramux("adapter", "import", "s3://nowhere/a/", "--name", "x", *at, code=1).stderr
    assert "uploads.buckets" in told


def test_adapter_push_rejected_shows_the_report(site: Site, folders: list[Path], tmp_path: Path) -> None:
    spoiled = shutil.copytree(folders[0], tmp_path / "spoiled")
    config = json.loads((spoiled / "adapter_config.json").read_bytes()) | {"target_modules": ["no_such_module"]}
    (spoiled / "adapter_config.json").write_text(json.dumps(config))
    at = ("--url", site.url, "--key", site.keys["acme"])
    told = loramux("adapter", "push", str(spoiled), *at, code=1)
    assert "target_modules" in told.stderr
    assert "no  " in told.stderr
    printed = loramux("adapter", "push", str(spoiled), *at, "--json", code=1)
    assert json.loads(printed.stdout)["state"] == "rejected"
    assert "spoiled" not in loramux("adapter", "ls", *at).stdout
    assert "rejected acme/spoiled" in " ".join(loramux("adapter", "logs", "spoiled", *at).stdout.split())


def test_server_refusal_is_shown_in_its_words(site: Site, base_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(base_dir, tmp_path)
    wrong_key = loramux("adapter", "push", str(folder), "--url", site.url, "--key", "sk-lm-wrong", code=1)
    assert "unknown or was revoked" in wrong_key.stderr
    at = ("--url", site.url, "--key", site.keys["acme"])
    assert "no name for an adapter" in loramux("adapter", "push", str(folder), "--name", "A B", *at, code=1).stderr


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_example_settings_are_valid(file: Path) -> None:
    settings = load_settings(file)
    assert settings.model.served_model_name
    if file.name == "demo.toml":
        assert (Path(settings.model.path) / "config.json").is_file()
