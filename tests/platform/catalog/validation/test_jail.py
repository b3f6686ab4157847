"""The filesystem jail: attacks of a process that was taken over, each from a real job of a sandbox."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from loramux.catalog.validation.validator import BaseValidators
from loramux.common.sandbox import jail
from loramux.common.sandbox.jail import landlock_abi
from loramux.common.sandbox.sandbox import JobLimits, Sandbox
from loramux.common.settings.file import Settings

pytestmark = pytest.mark.skipif(landlock_abi() < 6, reason="needs a kernel with Landlock ABI 6 (Linux 6.12)")


@dataclass(frozen=True)
class Jailed:
    """A sandbox whose jobs may read `package` and write `into`; `server` has what is not theirs."""

    sandbox: Sandbox
    package: Path
    into: Path
    server: Path

    def attempt(self, attack: str, target: object) -> str:
        limits = JobLimits(64 << 20, 20, 60, 1 << 20, readable=(str(self.package),), writable=(str(self.into),))
        result = self.sandbox.run(json.dumps(["attempt", [attack, str(target)]]).encode(), limits)
        return json.loads(bytes(result.value))["told"]


@pytest.fixture(scope="module")
def jailed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jailed]:
    root = tmp_path_factory.mktemp("jail")
    package, into, server = root / "package", root / "into", root / "server"
    for folder in (package, into, server / "blobs/globex", server / "uploads/globex"):
        folder.mkdir(parents=True)
    (package / "adapter_config.json").write_text("{}")
    (server / "loramux.sqlite3").write_text("every tenant's rows")
    (server / "blobs/globex/adapter_model.safetensors").write_text("another tenant's weights")
    with closing(Sandbox("sandbox_jobs", b"1")) as sandbox:
        yield Jailed(sandbox, package, into, server)


def test_jailed_job_uses_its_own_folders(jailed: Jailed) -> None:
    assert jailed.attempt("read", jailed.package / "adapter_config.json") == "b'{}'"
    assert jailed.attempt("list", jailed.package) == "['adapter_config.json']"
    assert jailed.attempt("write", jailed.into / "made") == "None"
    assert jailed.attempt("make a folder", jailed.into / "folder") == "None"
    assert jailed.attempt("remove", jailed.into / "made") == "None"


@pytest.mark.parametrize(
    ("attack", "path"),
    [
        ("read", "/etc/passwd"),
        ("read", "/proc/self/root/etc/passwd"),
        ("list", "/"),
        ("list", "/tmp"),
        ("list", str(Path.cwd())),
        ("run", "/bin/sh"),
        ("write", "/tmp/written-by-a-jailed-job"),
        ("write", "/dev/shm/written-by-a-jailed-job"),
    ],
)
def test_jailed_job_reaches_nothing_of_the_machine(jailed: Jailed, attack: str, path: str) -> None:
    assert jailed.attempt(attack, path) == "EACCES"
    assert not Path(path).name.startswith("written") or not Path(path).exists()


@pytest.mark.parametrize("file", ["loramux.sqlite3", "blobs/globex/adapter_model.safetensors"])
@pytest.mark.parametrize("attack", ["read", "write", "write over", "truncate", "remove"])
def test_jailed_job_reaches_neither_the_database_nor_another_tenants_blob(
    jailed: Jailed, attack: str, file: str
) -> None:
    before = (jailed.server / file).read_text()
    assert jailed.attempt(attack, jailed.server / file) == "EACCES"
    assert (jailed.server / file).read_text() == before


@pytest.mark.parametrize("attack", ["write over", "truncate", "remove"])
def test_jailed_job_does_not_change_the_package_that_it_checks(jailed: Jailed, attack: str) -> None:
    assert jailed.attempt(attack, jailed.package / "adapter_config.json") == "EACCES"
    assert jailed.attempt("write", jailed.package / "more") == "EACCES"
    assert os.listdir(jailed.package) == ["adapter_config.json"]


def test_jailed_job_reaches_nothing_by_a_link_in_its_folder(jailed: Jailed) -> None:
    (jailed.into / "link").symlink_to(jailed.server / "loramux.sqlite3")
    assert jailed.attempt("open through a link", jailed.into / "link") == "EACCES"
    assert jailed.attempt("read", jailed.into / "../server/loramux.sqlite3") == "EACCES"


def test_jailed_job_reaches_no_process_of_the_server(jailed: Jailed) -> None:
    assert jailed.attempt("read", f"/proc/{os.getpid()}/environ") == "EACCES"
    assert jailed.attempt("kill", os.getpid()) == "EPERM"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0loramux-jail-test")
        listener.listen()
        assert jailed.attempt("connect to an abstract socket", "loramux-jail-test") in ("EPERM", "ECONNREFUSED")


def test_jail_holds_for_children_and_leaves_python_whole(tmp_path: Path) -> None:
    """Runs in a separate process: the folder that it was started from is not Python's, although it is on sys.path."""
    (tmp_path / "secret").write_text("x")
    (tmp_path / "own").mkdir()
    code = (
        "import subprocess, sys\n"
        "from loramux.common.sandbox.jail import enter_jail\n"
        "assert enter_jail(['own', 'no such folder'], [])\n"
        "import statistics, xml.dom.minidom, zoneinfo\n"
        "open('/dev/null', 'w').write('x')\n"
        "read = 'import sys; open(sys.argv[1]).read()'\n"
        "print([subprocess.run([sys.executable, '-c', read, p], stderr=subprocess.DEVNULL).returncode"
        " for p in ('/etc/passwd', 'secret', '/proc/cpuinfo')])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[1, 1, 0]", "")


def test_kernel_without_landlock_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loramux.catalog.validation.validator.may_leave_network", lambda: True)
    settings = Settings(model={"path": "/none", "served_model_name": "tiny"})  # type: ignore[arg-type]
    BaseValidators(settings, {}).close()
    assert caplog.records == []
    monkeypatch.setattr(jail, "landlock_abi", lambda: 0)
    monkeypatch.setattr("loramux.catalog.validation.validator.landlock_abi", lambda: 0)
    BaseValidators(settings, {}).close()
    (record,) = caplog.records
    assert "the kernel has no Landlock" in record.message
    assert jail.enter_jail([], []) is False
    assert Path("/etc/passwd").read_text()


def test_kernel_without_network_namespaces_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loramux.catalog.validation.validator.may_leave_network", lambda: False)
    BaseValidators(Settings(model={"path": "/none", "served_model_name": "tiny"}), {}).close()  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "the kernel allows no network namespace" in record.message
