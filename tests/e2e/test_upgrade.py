"""Two servers on one PostgreSQL are exchanged for those of another release under load, and back.

pytest tests/e2e/test_upgrade.py -m slow -s     # with 0.1.0, from the repository's history
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from peft_uploads import form, make_adapter
from postgres_server import start_postgres
from server_process import Child, Place, served

from loramux.data.records.database import parse_url

RELEASE_0_1_0 = "b53332b"
ROOT = Path(__file__).parents[2]
CLIENTS = 8
TOKENS = 6


class Rotation:
    """The load balancer's servers, and clients that send one request after the other to any of them."""

    def __init__(self, key: str, servers: list[str]) -> None:
        self._servers = servers
        self._in_flight: Counter[str] = Counter()
        self._changed = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        self._key = key
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(seed,)) for seed in range(CLIENTS)]
        self._texts: dict[str, set[str]] = {"tiny": set(), "acme/upper": set()}

    def __enter__(self) -> Rotation:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def add(self, server: Child) -> None:
        with self._changed:
            self._servers.append(server.url)

    def take_out(self, server: Child) -> None:
        """It gets no more requests, and those that it has been sent are answered."""
        with self._changed:
            self._servers.remove(server.url)
            assert self._changed.wait_for(lambda: not self._in_flight[server.url], 120)

    @contextmanager
    def _server(self, choice: random.Random) -> Iterator[str]:
        with self._changed:
            url = choice.choice(self._servers)
            self._in_flight[url] += 1
        yield url
        with self._changed:
            self._in_flight[url] -= 1
            self._changed.notify_all()

    def wait_for_more(self, answers: int) -> None:
        until, wanted = time.monotonic() + 120, self.outcomes["200"] + answers
        while self.outcomes["200"] < wanted:
            assert time.monotonic() < until, self.outcomes
            time.sleep(0.05)

    def assert_sound(self) -> None:
        assert set(self.outcomes) == {"200"}, self.outcomes
        assert [len(texts) for texts in self._texts.values()] == [1, 1], "one answer each, whoever gave it"

    def _send(self, seed: int) -> None:
        choice = random.Random(seed)
        headers = {"Authorization": f"Bearer {self._key}"}
        while not self._ended.is_set():
            model = choice.choice(["tiny", "acme/upper"])
            body = {"model": model, "prompt": "hello", "max_tokens": TOKENS, "temperature": 0}
            with self._server(choice) as url:
                try:
                    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
                except httpx.TransportError as error:
                    self.outcomes[type(error).__name__] += 1
                else:
                    self.outcomes[str(answer.status_code)] += 1
                    self._texts[model].add(answer.text if answer.status_code != 200 else said(answer))


@pytest.fixture
def postgresql() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lm-upgrade-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = start_postgres(Path(folder) / "data")
        yield server.get_uri()
        with suppress(Exception):
            server.cleanup()


@contextmanager
def tree_of(revision: str, folder: Path) -> Iterator[Path]:
    """The source of another release, from this repository's history."""
    known = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{revision}^{{commit}}"], check=False)
    if known.returncode:
        pytest.skip(f"the history does not reach back to {revision}")
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", folder, revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)


def said(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def exchange(rotation: Rotation, stack: ExitStack, old: tuple[ExitStack, Child], new: Place) -> None:
    """Out of rotation, ended in order, and one of `new` in its place."""
    running, server = old
    rotation.take_out(server)
    running.close()
    assert server.process.returncode == 0
    rotation.add(stack.enter_context(served(new)))
    rotation.wait_for_more(30)


def two_servers(stack: ExitStack, place: Place) -> list[tuple[ExitStack, Child]]:
    running = [stack.enter_context(ExitStack()) for _ in range(2)]
    return [(each, each.enter_context(served(place))) for each in running]


def upload(server: Child, key: str, base_dir: Path, folder: Path) -> None:
    with server.http(key) as http:
        assert http.post("/v1/adapters", **form(make_adapter(base_dir, folder), "upper")).status_code == 201


def exchange_under_load(
    old: Place, new: Place, key: str, adapter: Callable[[Child], None], migrate: Callable[[], object]
) -> Counter[str]:
    """Run two servers of `old`, migrate while they run, then run two of `new`; return the clients' answers."""
    with ExitStack() as stack:
        servers = two_servers(stack, old)
        adapter(servers[0][1])
        with Rotation(key, [server.url for _, server in servers]) as rotation:
            rotation.wait_for_more(30)
            migrate()
            rotation.wait_for_more(30)
            for each in servers:
                exchange(rotation, stack, each, new)
        rotation.assert_sound()
        return rotation.outcomes


@pytest.mark.slow
def test_upgrade_from_0_1_0_under_load_fails_no_request(postgresql: str, base_dir: Path, tmp_path: Path) -> None:
    with tree_of(RELEASE_0_1_0, tmp_path / "0.1.0") as tree:
        new = Place(tmp_path, base_dir, url=postgresql).prepare()
        old = replace(new, tree=tree, folder=tmp_path / "old")
        old.folder.mkdir()
        old.config.write_text(in_the_words_of_0_1_0(new.config.read_text(), tmp_path))
        old.loramux("migrate")
        key = old.key_of("acme")
        outcomes = exchange_under_load(
            old, new, key, lambda server: upload(server, key, base_dir, tmp_path / "a"), lambda: new.loramux("migrate")
        )
        print(f"\n{outcomes}")
        assert new.loramux("usage", "reconcile")["drift_tokens"] == 0


NEWER_SETTINGS = ("lame_duck_seconds", "tensor_parallel_size")


def in_the_words_of_0_1_0(config: str, folder: Path) -> str:
    lines = [line for line in config.splitlines() if not line.startswith(NEWER_SETTINGS)]
    paths = [f'{name} = "{folder}/var/{name}"' for name in ("blobs", "cache")]
    return "\n".join([*lines, *paths, f'pepper_file = "{folder}/var/pepper"', ""])


def test_servers_of_this_release_are_started_on_the_next_ones_schema(
    postgresql: str, base_dir: Path, tmp_path: Path
) -> None:
    """An upgrade that is taken back: the next release's migration stays, and this release's servers start again."""
    place = Place(tmp_path, base_dir, in_process=True, url=postgresql).prepare()
    place.loramux("migrate")
    key = place.key_of("acme")
    exchange_under_load(
        place,
        place,
        key,
        lambda server: upload(server, key, base_dir, tmp_path / "a"),
        lambda: migrate_to_the_next_release(postgresql),
    )
    assert place.loramux("usage", "reconcile")["drift_tokens"] == 0


def migrate_to_the_next_release(url: str) -> None:
    engine = sa.create_engine(parse_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE keys ADD COLUMN of_the_next_release TEXT"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
