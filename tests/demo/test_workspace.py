from __future__ import annotations

import socket

import click
import pytest
from click.testing import CliRunner

from loramux.common.settings.file import load_settings
from loramux_demo.assets import MODEL_NAME, OWNERS, base_folder
from loramux_demo.cli import demo_command
from loramux_demo.server import ServerDied, Workspace, create_customers, free_port, running_server


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "demo", free_port(None))
    workspace.prepare()
    return workspace


def test_free_port_returns_the_wanted_port():
    port = free_port(None)
    assert free_port(port) == port


def test_free_port_replaces_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port


def test_workspace_settings_are_valid(workspace):
    settings = load_settings(workspace.config)
    assert settings.model.path == str(base_folder())
    assert settings.model.served_model_name == MODEL_NAME
    assert settings.server.port == workspace.port
    assert settings.records.blobs.startswith(str(workspace.folder))


def test_create_customers_returns_keys(workspace):
    keys = create_customers(workspace)
    assert set(keys) == set(OWNERS)
    assert all(key.startswith("sk-lm-") for key in keys.values())


def test_workspace_command_failure_has_the_reason(workspace):
    with pytest.raises(click.ClickException, match=r"loramux key create --tenant nobody failed: .*nobody"):
        workspace.loramux("key", "create", "--tenant", "nobody")


def test_server_death_shows_the_last_log_lines(workspace):
    workspace.config.write_text(workspace.config.read_text().replace(str(base_folder()), "nowhere"))
    with running_server(workspace) as server, pytest.raises(ServerDied, match=r"exit code 1.*(?s:.*nowhere)"):
        server.wait_until_ready()


def test_demo_refuses_a_folder_that_is_not_empty(workspace):
    done = CliRunner().invoke(demo_command, ["--once", "--dir", str(workspace.folder)])
    assert done.exit_code == 2
    assert "is not empty" in done.output
    assert "loramux serve --config" in done.output
