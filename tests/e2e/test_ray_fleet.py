"""Engines as actors of a real Ray cluster of two nodes: killed ones are started again by Ray, and streams go on.

pytest -m slow tests/e2e/test_ray_fleet.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_site import check_weights, command_line, make_fleet, restarts, survives_kills
from listening import until
from server_process import Child
from tiny_base import make_base

from loramux.common.settings.file import Settings
from loramux.common.settings.server import RecordsSettings
from loramux.common.settings.serving import BaseSettings, EngineRange, EngineSettings, FleetSettings, RaySettings
from loramux.engine.messages import Request, SamplingParams, TokenEvent
from loramux.fleet.group import EngineGroup
from loramux.fleet.launching import launcher_of

ray = pytest.importorskip("ray")

LENGTH = 300
STREAMS = 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        node = {"num_cpus": 2, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        cluster.add_node(**node)
        ray.init(address=cluster.address)
        yield cluster
    ray.shutdown()
    cluster.shutdown()


def settings_on(cluster: Any, folder: Path, namespace: str, engines: int = 2) -> Settings:
    model = make_base(folder / "base", context=512)
    base = BaseSettings(
        name="tiny",
        path=str(model),
        dtype="float32",
        engines=EngineRange(min=engines),
        engine=EngineSettings(pool_bytes=16 << 20, num_threads=1),
    )
    where = RaySettings(address=cluster.address, namespace=namespace, num_gpus=0, unused_s=3)
    return Settings(
        model=base.model,
        bases=(base,),
        engine=base.engine,
        fleet=FleetSettings(launcher="ray", ray=where),
        records=RecordsSettings(blobs=str(folder / "blobs"), cache=str(folder / "cache")),
    )


def request(name: str, number: int) -> Request:
    temperature, seed = (0.0, None) if number % 2 else (1.1, number)
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=temperature, seed=seed)
    return Request(id=name, tenant="t", prompt_token_ids=[1, 2, 3 + number], sampling=sampling)


async def answers(group: EngineGroup, round_: str) -> list[list[int]]:
    events: list[list[TokenEvent]] = [[] for _ in range(STREAMS)]
    for number, seen in enumerate(events):
        group.submit(request(f"{round_}-{number}", number), seen.append)
    await until(lambda: all(seen and seen[-1].finish_reason for seen in events), 300)
    assert {seen[-1].finish_reason for seen in events} == {"length"}, events[0][-1]
    return [[event.token_id for event in seen if event.token_id is not None] for seen in events]


def actors(namespace: str) -> list[str]:
    """Names of those that live."""
    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == namespace]


def in_group(settings: Settings, test: Callable[[EngineGroup], Awaitable[None]]) -> None:
    async def run() -> None:
        base = settings.bases[0]
        group = EngineGroup(base, settings.of_base(base), launcher_of(settings))
        await group.start()
        try:
            await test(group)
        finally:
            await group.stop()

    asyncio.run(run())


def engine_pids(_: Child) -> list[int]:
    """The processes of the one fleet on this machine's Ray."""
    found = (int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit())
    return [pid for pid in found if command_line(str(pid)).startswith(b"ray::EngineActor")]


def test_sixty_four_streams_over_forty_adapters_survive_ten_kills_and_a_rolling_restart(
    cluster: Any, tmp_path: Path
) -> None:
    where = f'address = "{cluster.address}"\nnamespace = "e2e"\nnum_gpus = 0\nnum_cpus = 0.5\nunused_s = 5\n'
    for fleet in make_fleet(tmp_path, 40, f'[fleet]\nlauncher = "ray"\n[fleet.ray]\n{where}', engine_pids):
        check_weights(fleet, fleet.answers(64))
        assert survives_kills(fleet, streams=64, kills=10, pause=3.0) == 10
        restarts(fleet, [engine["engine"] for engine in fleet.engines()], streams=64)
    asyncio.run(until(lambda: not actors("e2e"), 120))


def test_two_servers_share_actors_which_end_when_none_uses_them(cluster: Any, tmp_path: Path) -> None:
    settings = settings_on(cluster, tmp_path, "shared", engines=1)

    async def test(group: EngineGroup) -> None:
        base = settings.bases[0]
        second = EngineGroup(base, settings.of_base(base), launcher_of(settings))
        await second.start()
        assert len(actors("shared")) == 1
        assert await answers(group, "a") == await answers(second, "b")
        await second.stop()
        assert await answers(group, "c")

    in_group(settings, test)
    asyncio.run(until(lambda: not actors("shared"), 120))


def test_lost_node_moves_its_engine_to_another_one(cluster: Any, tmp_path: Path) -> None:
    settings = settings_on(cluster, tmp_path, "nodes")
    doomed = cluster.add_node(num_cpus=2, object_store_memory=80 << 20, resources={"doomed": 1})
    cluster.wait_for_nodes()

    async def test(group: EngineGroup) -> None:
        undisturbed = await answers(group, "undisturbed")
        disturbed = asyncio.create_task(answers(group, "disturbed"))
        await until(lambda: any(status.requests for status in group.statuses()))
        await asyncio.to_thread(cluster.remove_node, doomed)
        assert await disturbed == undisturbed
        await until(lambda: all(status.state == "ready" for status in group.statuses()), 300)

    in_group(settings, test)


def test_lost_head_leaves_the_server_its_engines_and_then_the_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the nodes of a lost head, and the processes that were its drivers: a server is none."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")  # nodes end so long after their head
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20})
    settings = settings_on(cluster, tmp_path, "head", engines=1)

    async def test(group: EngineGroup) -> None:
        before = await answers(group, "before")
        cluster.head_node.kill_gcs_server()
        assert await answers(group, "after") == before
        (raylet,) = cluster.head_node.all_processes["raylet"]
        await asyncio.to_thread(raylet.process.wait, 120)
        await until(lambda: group.statuses()[0].state != "ready", 120)
        await until(lambda: "fleet.ray.address" in (group.statuses()[0].problem or ""), 120)

    try:
        in_group(settings, test)
    finally:
        cluster.shutdown()
