"""What the gateway holds: an engine it can send requests to, wherever the engine lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from loramux.engine.messages import EngineFault, EngineStats, ModelFacts, TokenEvent
from loramux.engine.request import AdapterRef, Request


class EngineClient(Protocol):
    """One engine, seen from an asyncio event loop."""

    async def start(self) -> ModelFacts:
        """Start the engine and wait until it serves; raises EngineDied when it cannot."""
        ...

    def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Submit `request` and yield its events; the last one has a finish_reason.

        Closing the iterator early (`aclose`, a cancelled task) cancels the request. Raises EngineDied when the
        engine ends under it.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its stream goes on to its last event, which says what it used. Ended ones are left alone."""
        ...

    def retire(self, digest: str) -> None:
        """Free a deleted revision's pages once nothing uses them."""
        ...

    async def pin(self, ref: AdapterRef, owner: str = "") -> EngineFault | None:
        """Keep a revision in the pool, for a tenant or (empty) the operator; waits until it is there.

        The fault says why it cannot be. Raises EngineDied when the engine ends meanwhile.
        """
        ...

    def unpin(self, digest: str, owner: str = "") -> None:
        """Keep it for `owner` no longer."""
        ...

    def stats(self) -> EngineStats:
        """The latest counters; never blocks."""
        ...

    @property
    def unclaimed_tokens(self) -> int:
        """Tokens of requests that ended when nobody was listening, so that no bill can hold them."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine serves."""
        ...

    async def stop(self) -> None:
        """Let running requests end, then stop the engine."""
        ...


class EngineDied(RuntimeError):
    """The engine ended without being asked to; its message says why."""
