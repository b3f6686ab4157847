"""The command line: what a newcomer reads, what a script reads, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from peft_uploads import make_adapter
from site_fixture import Site

from loramux.settings import load_settings
from loramux_api.cli import COMMANDS, main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config(base_dir: Path, tmp_path: Path) -> Path:
    file = tmp_path / "loramux.toml"
    file.write_text(f'[model]\npath = "{base_dir}"\nserved_model_name = "tiny"\n[server]\nport = 8765\n')
    return file


def loramux(*arguments: str, code: int = 0, **environment: str) -> Result:
    environment = {"LORAMUX_API_KEY": "", "LORAMUX_CONFIG": "", "LORAMUX_URL": ""} | environment
    result = CliRunner().invoke(main, arguments, env=environment)
    assert result.exit_code == code, result.output
    return result


def read(*arguments: str) -> Any:
    """What the command prints with --json, which is one document and nothing else."""
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
def test_every_command_explains_itself_with_an_example(path: tuple[str, ...]) -> None:
    shown = loramux(*path, "--help").stdout
    assert f"loramux {' '.join(path)}" in shown.split("Example:")[1]
    assert "--json" in shown


HOUSELESS = {("demo",), ("simulate",), ("plan",)}


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_that_touches_a_house_takes_its_settings(path: tuple[str, ...]) -> None:
    assert path in HOUSELESS or "--config" in loramux(*path, "--help").stdout


def test_the_list_of_commands_is_the_commands() -> None:
    shown = loramux("--help").stdout
    assert all(name in shown and meaning in shown for name, (_, meaning) in COMMANDS.items())


def test_tenants_and_keys_from_nothing(config: Path) -> None:
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


def test_an_operators_day_without_a_server(config: Path) -> None:
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
    assert read("limit", "set", "concurrent_requests", "2", "--on", web["id"], *of_acme)["subject"] == web["id"]
    assert read("limit", "set-tier", "adapters", "5", "--tier", "batch", *where)["value"] == 5
    assert {one["name"] for one in read("limit", "ls", *of_acme)} == {"concurrent_requests", "adapters"}
    assert read("limit", "rm", "concurrent_requests", *of_acme)["name"] == "concurrent_requests"
    assert read("budget", "set", "month", "12.000000001", *of_acme)["amount"] == 12_000_000_001
    assert read("budget", "ls", *of_acme)[0]["spent"] == 0
    assert read("budget", "rm", "month", *of_acme)["period"] == "month"
    log = read("audit", "ls", *of_acme)
    assert log[0]["action"] == "budget.remove"
    assert read("audit", "ls", "--limit", "1", "--before", str(log[0]["sequence"]), *where)[0]["action"] == "budget.put"
    for amount in ("x", "1.2.3", "1.0000000001", "-1", ""):
        assert loramux("budget", "set", "day", amount, *of_acme, code=2)


def test_a_key_alone_goes_to_stdout(config: Path) -> None:
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
def test_a_refusal_is_one_sentence_on_stderr(config: Path, arguments: tuple[str, ...], told: str) -> None:
    given = [argument.format(here=config.parent) for argument in arguments]
    result = loramux(*given, "--config", str(config), code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_second_tenant_of_the_same_name_is_refused(config: Path) -> None:
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
def test_settings_that_cannot_be_are_refused_by_field(tmp_path: Path, text: str | None, told: str) -> None:
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


def test_migrate_twice(config: Path) -> None:
    first = read("migrate", "--config", str(config))
    assert first["revision"]
    assert read("migrate", "--config", str(config)) == first


@pytest.fixture(scope="session")
def folders(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two revisions of an adapter."""
    return [make_adapter(base_dir, tmp_path_factory.mktemp("cli") / "my-adapter", seed=seed) for seed in (41, 42)]


def test_from_a_folder_to_canary_rollback_and_back_from_the_dead(
    site: Site, folders: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(site.keys["globex"] + "\n")
    at = ("--url", f"{site.url}/v1", "--key-file", str(tmp_path / "key"))
    first = read("adapter", "push", str(folders[0]), *at)
    assert (first["revision"], first["state"]) == ("globex/my-adapter@1", "ready")
    told = loramux("adapter", "push", str(folders[0]), "--name", "my-adapter", *at).stdout
    assert first["digest"] in told
    assert "ok  " in told
    assert "rank 4" in told
    second = loramux("adapter", "push", str(folders[1]), "--name", "my-adapter", "--no-promote", *at).stdout
    assert "loramux adapter promote globex/my-adapter@2" in second
    assert "globex/my-adapter@1" in loramux("adapter", "ls", *at).stdout
    assert "5% of" in loramux("adapter", "canary", "my-adapter@2", "5", *at).stdout
    shown = loramux("adapter", "show", "my-adapter", *at).stdout
    assert ":default -> @1 95%, @2 5%" in shown
    assert "globex/my-adapter:default is @2 now." in loramux("adapter", "promote", "my-adapter@2", *at).stdout
    assert read("adapter", "show", "my-adapter", *at)["adapter"]["revision"] == 2
    assert "is @1, @2 again" in loramux("adapter", "rollback", "my-adapter", *at).stdout
    assert read("adapter", "rollback", "my-adapter", "--to", "1", *at)["revision"] == 1
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
    assert "my-adapter is back; globex/my-adapter is @1." in loramux("adapter", "undelete", "my-adapter", *at).stdout
    lines = loramux("adapter", "logs", "my-adapter", *at).stdout.splitlines()
    assert first["digest"] in next(line for line in lines if "request" in line and "settled" in line)
    assert [line for line in lines if "retired" in line and "@2" in line]
    assert read("adapter", "logs", "my-adapter", "--limit", "1", *at)["requests"][0]["model"] == "globex/my-adapter@1"
    loramux("adapter", "rm", "my-adapter", *at)


def test_a_canary_that_cannot_be_is_refused(site: Site, folders: list[Path]) -> None:
    at = ("--url", site.url, "--key", site.keys["acme"])
    loramux("adapter", "push", str(folders[0]), "--name", "lone", *at)
    assert "points at no other revision" in loramux("adapter", "canary", "lone@1", "5", *at, code=1).stderr
    assert "support@3" in loramux("adapter", "promote", "lone", *at, code=2).stderr
    assert "LORAMUX_API_KEY" in loramux("adapter", "ls", "--url", site.url, code=2).stderr
    loramux("adapter", "rm", "lone", *at)
    assert "40 digits" in loramux("adapter", "import", "hf:a/b@main", "--name", "x", *at, code=2).stderr
    told = loramux("adapter", "import", "s3://nowhere/a/", "--name", "x", *at, code=1).stderr
    assert "uploads.buckets" in told


def test_a_rejected_upload_is_reported_and_leaves_nothing(site: Site, folders: list[Path], tmp_path: Path) -> None:
    spoiled = shutil.copytree(folders[0], tmp_path / "spoiled")
    config = json.loads((spoiled / "adapter_config.json").read_bytes()) | {"bias": "all"}
    (spoiled / "adapter_config.json").write_text(json.dumps(config))
    at = ("--url", site.url, "--key", site.keys["acme"])
    told = loramux("adapter", "push", str(spoiled), *at, code=1)
    assert "bias" in told.stderr
    assert "no  " in told.stderr
    printed = loramux("adapter", "push", str(spoiled), *at, "--json", code=1)
    assert json.loads(printed.stdout)["state"] == "rejected"
    assert "spoiled" not in loramux("adapter", "ls", *at).stdout
    assert "rejected  acme/spoiled" in loramux("adapter", "logs", "spoiled", *at).stdout


def test_what_the_server_refuses_is_told_in_its_own_words(site: Site, base_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(base_dir, tmp_path)
    wrong_key = loramux("adapter", "push", str(folder), "--url", site.url, "--key", "sk-lm-wrong", code=1)
    assert "unknown or was revoked" in wrong_key.stderr
    at = ("--url", site.url, "--key", site.keys["acme"])
    assert "no name for an adapter" in loramux("adapter", "push", str(folder), "--name", "A B", *at, code=1).stderr


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_the_settings_that_are_shipped_are_valid(file: Path) -> None:
    settings = load_settings(file)
    assert settings.model.served_model_name
    if file.name == "demo.toml":
        assert (Path(settings.model.path) / "config.json").is_file()
