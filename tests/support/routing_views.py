"""Views of engines and requests to route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loramux.engine.messages import KvIdentity
from loramux.fleet.router import Router
from loramux.fleet.view import EngineView, RoutingRequest


def engines(count: int, **fields: Any) -> list[EngineView]:
    common: dict[str, Any] = {
        "base": "base",
        "max_running": 64,
        "prefill_tokens_per_s": 10_000.0,
        "load_s": 0.05,
        "pages": 1000,
    }
    return [EngineView(engine=f"e{n}", **{"free_pages": 900, **common, **fields}) for n in range(count)]


def changed(views: list[EngineView], engine: str, **fields: Any) -> list[EngineView]:
    return [msgspec.structs.replace(view, **fields) if view.engine == engine else view for view in views]


def ask(number: int, digest: str | None = "a", prompt: int = 500, tenant: str = "t", **rest: Any) -> RoutingRequest:
    scope = "" if digest else "project"
    return RoutingRequest(id=f"r{number}", identity=KvIdentity(tenant, digest, scope), prompt_tokens=prompt, **rest)


def route(router: Router, request: RoutingRequest, views: Sequence[EngineView], now: float = 0.0) -> str:
    engine = router.choose(request, views, now)
    assert engine is not None
    router.sent(request, engine, now)
    return engine
