from __future__ import annotations

import socket

import click
import pytest
from click.testing import CliRunner

from loramux.settings import load_settings
from loramux_demo.assets import MODEL_NAME, OWNERS, base_folder
from loramux_demo.cli import demo_command
from loramux_demo.house import House, create_customers, free_port
from loramux_demo.server import ServerDied, running_server


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path / "demo", free_port(None))
    house.furnish()
    return house


def test_a_free_port_is_taken_as_wanted():
    port = free_port(None)
    assert free_port(port) == port


def test_a_taken_port_is_noticed_and_another_is_chosen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port


def test_the_settings_are_ones_that_the_server_takes(house):
    settings = load_settings(house.config)
    assert settings.model.path == str(base_folder())
    assert settings.model.served_model_name == MODEL_NAME
    assert settings.server.port == house.port
    assert settings.records.blobs.startswith(str(house.folder))


def test_the_tenants_get_keys_through_the_command_line(house):
    keys = create_customers(house)
    assert set(keys) == set(OWNERS)
    assert all(key.startswith("sk-lm-") for key in keys.values())


def test_a_command_that_fails_says_why(house):
    with pytest.raises(click.ClickException, match=r"loramux key create --tenant nobody failed: .*nobody"):
        house.loramux("key", "create", "--tenant", "nobody")


def test_a_server_that_dies_shows_its_last_words(house):
    house.config.write_text(house.config.read_text().replace(str(base_folder()), "nowhere"))
    with running_server(house) as server, pytest.raises(ServerDied, match=r"exit code 1.*(?s:.*nowhere)"):
        server.wait_until_ready()


def test_a_folder_with_something_in_it_is_refused(house):
    done = CliRunner().invoke(demo_command, ["--once", "--dir", str(house.folder)])
    assert done.exit_code == 2
    assert "is not empty" in done.output
    assert "loramux serve --config" in done.output
