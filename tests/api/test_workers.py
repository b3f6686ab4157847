"""Messages between the processes of a server with several workers, and their metrics, without the processes."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from running_server import free_port

from loramux.common.settings.file import SettingsError
from loramux.common.settings.server import ServerSettings
from loramux_api.listening import joined, reserved_addresses, shareable
from loramux_api.metrics import CollectedFamilies, of_workers
from loramux_api.peers import Link, LinkClosed, Peers

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refuse(_: Any) -> Any:
    raise ValueError("no")


async def echo(question: Any) -> Any:
    await asyncio.sleep(0.02 if question == "slow" else 0.0)
    return question


@asynccontextmanager
async def linked(answer: Any) -> AsyncIterator[tuple[Link, socket.socket]]:
    """A link to a process that answers with `answer`, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    link, other = Link(ours, echo), Link(theirs, answer)
    tasks = [asyncio.create_task(one.serve()) for one in (link, other)]
    await asyncio.sleep(0.01)
    yield link, theirs
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_link_answers_questions_in_any_order_and_of_any_size() -> None:
    async with linked(echo) as (link, _):
        large = "x" * 5_000_000
        assert await asyncio.gather(*(link.ask(one) for one in ("slow", large, "c"))) == ["slow", large, "c"]


async def test_link_to_a_process_that_fails_or_has_ended_does_not_wait() -> None:
    async with linked(refuse) as (link, other):
        with pytest.raises(LinkClosed, match="could not answer"):
            await link.ask("a")
        other.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LinkClosed, match="has ended"):
            await link.ask("b")
        assert await Peers(1, link).ask("c") == {}


async def test_address_is_shared_with_workers_and_refused_to_a_second_server() -> None:
    settings = ServerSettings(port=free_port())
    with reserved_addresses(settings) as addresses:
        shared = shareable(addresses)
        own = [joined(replace(shared[0], socket=shared[0].socket.dup())) for _ in range(2)]
        for address in own:
            address.socket.listen()
        with pytest.raises(SettingsError, match="Address already in use"), reserved_addresses(settings):
            pass
        accepted = {address.socket.fileno(): 0 for address in own}
        for _ in range(64):
            with socket.create_connection((settings.host, settings.port)):
                for listener in select.select(list(accepted), [], [], 5)[0]:
                    accepted[listener] += 1
                    next(one.socket for one in own if one.socket.fileno() == listener).accept()[0].close()
        assert all(accepted.values()), accepted
        for address in own:
            address.socket.close()


def families(answered: float, steps: float) -> list[Metric]:
    own = CounterMetricFamily("answers", "Answers.", labels=["status"])
    own.add_metric(["200"], answered)
    engine = GaugeMetricFamily("steps", "Steps.", labels=["engine"])
    engine.add_metric(["tiny-0"], steps)
    return [own, engine]


async def test_metrics_of_workers_name_them_and_count_engines_once() -> None:
    joined = generate_latest(CollectedFamilies(of_workers(1, families(3, 7), {0: families(4, 6)}))).decode()
    samples = [line for line in joined.splitlines() if not line.startswith("#")]
    assert samples == [
        'answers_total{status="200",worker="1"} 3.0',
        'answers_total{status="200",worker="0"} 4.0',
        'steps{engine="tiny-0"} 7.0',
    ]
