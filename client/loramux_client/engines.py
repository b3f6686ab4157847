"""Flows of /admin/engines, for operators."""

from __future__ import annotations

from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import Engine, Listing

POLL_SECONDS = 1.0


def list_engines() -> Flow[list[Engine]]:
    """Return the engines of every base, with their state."""
    return (yield from Call(method="GET", path="/admin/engines", answer=Listing[Engine], repeatable=True)).data


def drain(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Take an engine out of service, and return once it is stopped; what runs after `seconds` goes on elsewhere."""
    yield from _order("drain", engine, seconds)
    return (yield from _once(engine, "lost", 0))


def restart(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Drain an engine and start it again, and return once it serves or has failed to start."""
    before = yield from _order("restart", engine, seconds)
    return (yield from _once(engine, "", before.starts))


def _order(verb: str, engine: str, seconds: float) -> Call[Engine]:
    body = {"engine": engine, "seconds": seconds}
    return Call(method="POST", path=f"/admin/engines/{verb}", answer=Engine, body=body)


def _once(name: str, state: str, starts: int) -> Flow[Engine]:
    """Poll until the engine is in `state`, or has been started again and is no longer loading its model."""
    while True:
        found = yield from list_engines()
        engine = next(one for one in found if one.engine == name)
        is_over = engine.state == state if state else engine.starts > starts and engine.state != "starting"
        if is_over:
            return engine
        yield Wait(POLL_SECONDS)


class Engines(Resource[R]):
    """`client.engines`."""

    list = method(list_engines)
    drain = method(drain)
    restart = method(restart)
