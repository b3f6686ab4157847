from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked_server import Harness
from attacks import Files, files_of
from peft_uploads import make_adapter
from server_process import Place, served
from tiny_base import make_base


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), context=8192)


@pytest.fixture(scope="session")
def sound(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files_of(make_adapter(base_dir, tmp_path_factory.mktemp("adapter")))


@pytest.fixture(scope="session")
def harness(base_dir: Path, sound: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    place = Place(tmp_path_factory.mktemp("server"), base_dir).prepare()
    key = place.key_of("acme")
    with served(place) as server:
        harness = Harness(place, server, key, sound)
        assert harness.upload(sound, "sound").status_code == 201
        yield harness
        server.process.terminate()
        assert server.process.wait(60) == 0
