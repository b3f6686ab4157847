"""docs/adapters.md says nothing that does not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from peft_uploads import make_adapter
from site_fixture import Site

from loramux_api.cli.main import main
from loramux_client import Client

DOCS = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
SHELL = "".join(re.findall(r"^```\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE))
PYTHON = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


@pytest.fixture(scope="session")
def trained(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`my-adapter` and `my-adapter-v2`."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in ((51, "my-adapter"), (52, "my-adapter-v2")):
        make_adapter(base_dir, folder / name, seed=seed)
    return folder


@pytest.fixture
def harness(site: Site, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Environment in which the page's lines run: the folder with the adapters, and the server's address."""
    monkeypatch.chdir(trained)
    monkeypatch.setenv("LORAMUX_URL", site.url)
    monkeypatch.setenv("LORAMUX_API_KEY", site.keys["globex"])
    return site


def test_the_lines_of_shell(harness: Site) -> None:
    lines = [line.strip().partition(" #")[0] for line in SHELL.splitlines() if line.startswith("loramux adapter ")]
    assert [line.split()[2] for line in lines][2:] == ["canary", "logs", "promote", "rollback", "rollback", "rm"]
    for line in lines:
        ended = CliRunner().invoke(main, shlex.split(line)[1:])
        assert ended.exit_code == 0, f"{line}: {ended.output}"
    with Client() as client:
        assert client.adapters.get("support").revision == 1
        client.adapters.delete("support")


def test_the_lines_of_python(harness: Site) -> None:
    calls, flow = (block.replace("http://127.0.0.1:8000", harness.url) for block in PYTHON)
    exec(calls.replace("sk-lm-...", harness.keys["globex"]), {})
    said = flow.replace("Wait(600)", "Wait(0)").partition("client.run(")
    with Client() as client:
        assert client.adapters.get("support").revision == 1
        exec(said[0] + "client.run(" + said[2], {"client": client})
        assert client.adapters.get("support").revision == 2
        client.adapters.delete("support")


def test_every_route_of_the_page_is_there(site: Site) -> None:
    paths = {re.sub(r"{(\w+):\w+}", r"{\1}", route.path) for route in site.server.app.routes}
    for path in set(re.findall(r"`(?:[A-Z]+,? ?)*`?,? ?`?(/v1/[a-z_/]+)", DOCS)):
        assert any(known.startswith(path.rstrip("/")) for known in paths), path
    for rest in re.findall(r"`(?:POST|PUT|GET) (/[a-z]+(?:/{\w+}(?:/[a-z]+)?)?)`", DOCS):
        if not rest.startswith("/v1"):
            assert "/v1/adapters/{name}" + rest in paths or rest in paths, rest
