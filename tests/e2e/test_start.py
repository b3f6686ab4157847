"""Starts that are refused: one sentence with the way out, exit code 1, no traceback. Through the real command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from running_server import free_port

ROOT = Path(__file__).parents[2]


def settings(base: Path, folder: Path, **more: str) -> str:
    sections = {"server": "port = 18999", "validation": "parity = false", "engine": "pool_bytes = 16_777_216"} | more
    text = f'[model]\npath = "{base}"\nserved_model_name = "tiny"\n'
    return text + "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items() if lines)


def start(folder: Path, *arguments: str, config: str | None = None) -> subprocess.CompletedProcess[str]:
    file = folder / "loramux.toml"
    if config is not None:
        file.write_text(config)
    return subprocess.run(
        [sys.executable, "-m", "loramux_api", "serve", *(arguments or ("--config", str(file)))],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """One sentence on stderr, in addition to log lines of the start, and nothing on stdout but the first line."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    others = [line for line in done.stderr.splitlines() if not line.startswith(("Error: ", '{"event": "loading', "20"))]
    assert (len(errors), others) == (1, []), done.stderr
    assert all(words in errors[0] for words in said), errors[0]


def test_start_of_the_readmes_first_settings_without_a_model_names_the_setting(tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs" / "single-node.toml", tmp_path)
    done = start(tmp_path, "--config", str(tmp_path / "single-node.toml"))
    assert_refused(done, "model.path", "does not exist", "single-node.toml", "loramux demo")


def test_start_with_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert_refused(start(tmp_path, config=settings(tmp_path, tmp_path)), "model.path", "has no config.json")


def test_start_without_a_settings_file_is_refused(tmp_path: Path) -> None:
    assert_refused(start(tmp_path), "loramux.toml", "does not exist")


def test_start_with_a_folder_as_settings_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "--config", str(tmp_path))
    assert done.returncode == 2
    assert "is a directory" in done.stderr


def test_start_with_unreadable_settings_is_refused(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "loramux.toml").symlink_to(tmp_path / "loramux.toml")
    assert_refused(start(tmp_path), "loramux.toml", "cannot be read")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model", ("is not valid TOML",)),
        ("[model]\npath = 'x'\nserved_model_name = 'y'\n[server]\nprot = 1", ("server", "prot")),
        ("[model]\npath = 'x'\nserved_model_name = 'y'\n[server]\nport = 99999", ("server.port",)),
    ],
)
def test_start_with_invalid_settings_names_the_field(tmp_path: Path, text: str, said: tuple[str, ...]) -> None:
    assert_refused(start(tmp_path, config=text), *said)


def test_start_on_a_taken_port_is_refused_before_the_model_is_loaded(base_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start(tmp_path, config=settings(base_dir, tmp_path, server=f"port = {port}"))
    assert_refused(done, "server.port", f"127.0.0.1:{port}", "Address already in use", "--port")


def test_start_on_an_unknown_host_is_refused(base_dir: Path, tmp_path: Path) -> None:
    done = start(tmp_path, config=settings(base_dir, tmp_path, server='host = "no-such-host.invalid"'))
    assert_refused(done, "server.host", "no-such-host.invalid")


def test_start_without_its_database_is_refused(base_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    records = f'url = "postgresql://loramux:secret@127.0.0.1:{port}/loramux"\nstart_seconds = 0'
    done = start(tmp_path, config=settings(base_dir, tmp_path, records=records))
    assert_refused(done, "database", str(port))
    assert "secret" not in done.stderr


def break_schema(records: Path) -> None:
    with closing(sqlite3.connect(records)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("UPDATE schema_floor SET revision = '9999'")


def remove_pepper(records: Path) -> None:
    for file in records.parent.glob("pepper*"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"), [(break_schema, ("schema", "9999")), (remove_pepper, ("pepper",))], ids=["schema", "pepper"]
)
def test_start_on_records_that_do_not_fit_is_refused(
    base_dir: Path, tmp_path: Path, spoil: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    records = 'url = "sqlite:///records.sqlite3"\nblobs = "blobs"\ncache = "cache"\npepper_file = "pepper"'
    text = settings(base_dir, tmp_path, records=records)
    (tmp_path / "loramux.toml").write_text(text)
    for arguments in (("tenant", "create", "acme"), ("key", "create", "--tenant", "acme")):
        command = [sys.executable, "-m", "loramux_api", *arguments, "--config", str(tmp_path / "loramux.toml")]
        subprocess.run(command, check=True, capture_output=True)
    spoil(tmp_path / "records.sqlite3")
    assert_refused(start(tmp_path, config=text), *said)


def test_start_on_records_that_are_not_a_database_is_refused(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "records.sqlite3").write_bytes(os.urandom(4096))
    done = start(tmp_path, config=settings(base_dir, tmp_path, records='url = "sqlite:///records.sqlite3"'))
    assert_refused(done, "records.sqlite3")


@pytest.mark.parametrize("name", ["blobs", "cache"])
def test_start_on_a_folder_that_is_a_file_is_refused(base_dir: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").write_text("a file")
    records = f'url = "sqlite:///records.sqlite3"\n{name} = "taken"'
    done = start(tmp_path, config=settings(base_dir, tmp_path, records=records))
    assert_refused(done, f"records.{name}", "taken")


def test_start_with_a_sink_without_its_secret_is_refused_before_the_model_is_loaded(
    base_dir: Path, tmp_path: Path
) -> None:
    sink = '[[sinks]]\nname = "meter"\nkind = "stripe"\nurl = "https://api.example"\nsecret_file = "absent"\n'
    done = start(tmp_path, config=settings(base_dir, tmp_path) + sink)
    assert_refused(done, "sinks.meter.secret_file", "absent")
    assert "loramux.engine" not in done.stderr


def test_start_on_a_host_that_no_name_can_be_is_refused(base_dir: Path, tmp_path: Path) -> None:
    done = start(tmp_path, config=settings(base_dir, tmp_path, server=f'host = "{"a" * 300}"'))
    assert_refused(done, "server.host", "no host has such a name")


def test_start_by_another_asgi_server_is_refused_in_one_sentence(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "loramux.toml").write_text(settings(base_dir, tmp_path, records='blobs = "taken"'))
    command = [sys.executable, "-m", "uvicorn", "--factory", "loramux_api.app:from_environment", "--port", "18998"]
    environment = os.environ | {"LORAMUX_CONFIG": str(tmp_path / "loramux.toml")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode not in (None, 0)
    assert "Traceback" not in done.stderr
    assert "Error: records.blobs" in done.stderr
    environment["LORAMUX_CONFIG"] = str(tmp_path / "absent.toml")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.startswith("Error: settings file")


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("torch is imported", signal.SIGINT),
        ("the model is loaded", signal.SIGINT),
        ("the model is loaded", signal.SIGTERM),
    ],
)
def test_start_interrupted_ends_quietly_with_the_signals_code(
    base_dir: Path, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    """Send a signal as from a terminal: the whole process group gets it."""
    (tmp_path / "loramux.toml").write_text(settings(base_dir, tmp_path, server=f"port = {free_port()}"))
    command = [sys.executable, "-m", "loramux_api", "serve", "--config", str(tmp_path / "loramux.toml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        maps, records = Path(f"/proc/{process.pid}/maps"), tmp_path / "var" / "loramux.sqlite3"
        while not (records.exists() if stage == "the model is loaded" else "libtorch" in maps.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, number)
        rest = process.stderr.read()
        assert process.wait(60) == 128 + number
    assert "Traceback" not in rest
    assert "Aborted" not in rest
    assert not living_after(process.pid, seconds=10)


def living_after(group: int, seconds: float) -> list[str]:
    """The processes of the group that have not ended; they have up to `seconds` for it, and are then still there."""
    deadline = time.monotonic() + seconds
    while (found := living(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def living(group: int) -> list[str]:
    """The processes of the group that have not ended."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in listed.splitlines()]
    return [line[2] for line in lines if line[0] == str(group) and not line[1].startswith("Z")]


@pytest.mark.parametrize(
    ("pool", "said"), [("1 ", ("engine.pool_bytes",)), (str(1 << 50), ("pool_bytes",))], ids=["too small", "too large"]
)
def test_start_without_memory_for_the_pool_is_refused(
    base_dir: Path, tmp_path: Path, pool: str, said: tuple[str, ...]
) -> None:
    done = start(tmp_path, config=settings(base_dir, tmp_path, engine=f"pool_bytes = {pool}"))
    assert_refused(done, *said)


IMPORTS = """
import atexit, os, sys
end, report = os._exit, lambda: print("imported torch" if "torch" in sys.modules else "no torch", file=sys.stderr)
os._exit = lambda code: (report(), end(code))
atexit.register(report)
from loramux_api.__main__ import run
run()
"""


def without(name: str) -> Callable[[Path], None]:
    def spoil(base: Path) -> None:
        for file in base.glob(name):
            file.unlink()

    return spoil


def with_config(text: str) -> Callable[[Path], None]:
    return lambda base: (base / "config.json").write_text(text) and None


def with_fields(**fields: object) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | fields))

    return change


def with_a_lost_shard(base: Path) -> None:
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (base / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    ("spoil", "more", "said"),
    [
        (with_config("{"), {}, "cannot be read"),
        (with_config("[]"), {}, "model_type"),
        (without("*.safetensors"), {}, "no *.safetensors"),
        (without("tokenizer*"), {}, "no tokenizer.json"),
        (with_a_lost_shard, {}, "model-00002-of-00002.safetensors"),
        (with_fields(model_type="gemma7"), {}, "the nearest of the supported ones are gemma"),
        (with_fields(rope_scaling={"type": "axial"}, rope_parameters=None), {}, "rope_type = 'axial'"),
        (with_fields(quantization_config={"quant_method": "exl3"}), {}, "quant_method 'exl3'"),
        (with_fields(is_causal=False), {}, "is_causal"),
        (lambda _: None, {"records": 'blobs = "loramux.toml"'}, "records.blobs"),
        (lambda _: None, {"adapters": 'local_root = "nowhere"'}, "adapters.local_root"),
    ],
    ids=[
        "broken config",
        "no model type",
        "no weights",
        "no tokenizer",
        "a shard is lost",
        "family",
        "rope",
        "quantization",
        "attention",
        "blobs",
        "local root",
    ],
)
def test_start_is_refused_before_torch_is_imported(
    base_dir: Path, tmp_path: Path, spoil: Callable[[Path], None], more: dict[str, str], said: str
) -> None:
    shutil.copytree(base_dir, tmp_path / "base")
    spoil(tmp_path / "base")
    (tmp_path / "loramux.toml").write_text(settings(tmp_path / "base", tmp_path, **more))
    assert_refused_without_torch(tmp_path, said, "serve")


def test_start_of_an_engine_is_refused_before_torch_is_imported(base_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(base_dir, tmp_path / "base")
    with_fields(model_type="gemma7")(tmp_path / "base")
    (tmp_path / "loramux.toml").write_text(settings(tmp_path / "base", tmp_path))
    assert_refused_without_torch(tmp_path, "gemma7", "engine", "serve", "--listen", "tcp://127.0.0.1:0")


def assert_refused_without_torch(folder: Path, said: str, *command: str) -> None:
    arguments = [sys.executable, "-c", IMPORTS, *command, "--config", str(folder / "loramux.toml")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "no torch"


FROZEN = """
import gc, os, signal, sys
from pathlib import Path
from loramux.common.settings.file import load_settings
from loramux_api.server import serve

def report(platform):
    print("frozen" if gc.get_freeze_count() > len(gc.get_objects()) else gc.get_freeze_count())
    os.kill(os.getpid(), signal.SIGTERM)

sys.exit(serve(load_settings(Path(sys.argv[1])), report))
"""


def test_started_server_keeps_its_own_objects_out_of_garbage_collection(base_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "loramux.toml"
    config.write_text(settings(base_dir, tmp_path, server=f"port = {free_port()}\nlame_duck_seconds = 0"))
    arguments = [sys.executable, "-c", FROZEN, str(config)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "frozen"), done.stderr
