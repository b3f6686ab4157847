"""One inference request: its caller, its headers, and the way from its body to its response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from litestar import Request, Response

from loramux.gateway import Answer, CompletionService, GenerationRequest
from loramux.tenants import Principal
from loramux_api.answering import Writer, respond
from loramux_api.auth import platform_of, principal_of
from loramux_api.headers import Deadline, IdempotencyKey, claim_of


@dataclass(frozen=True, slots=True)
class Inference:
    """What handlers of inference answer with; as a dependency it reads the headers that they share."""

    request: Request[Any, Any, Any]
    principal: Principal
    completions: CompletionService
    deadline_ms: int | None
    idempotency_key: str | None

    async def answer(
        self, asked: GenerationRequest, writer: Callable[[Answer], Writer], *, stream: bool
    ) -> Response[Any]:
        """Have `asked` answered, in the shape that `writer` gives it. Raises what CompletionService.begin does."""
        claim = await claim_of(self.request, self.idempotency_key)
        asked = replace(asked, deadline_ms=self.deadline_ms, claim=claim)
        answer = await self.completions.begin(self.principal, asked)
        return await respond(self.request, answer, writer(answer), stream=stream)


def inference(
    request: Request[Any, Any, Any],
    x_loramux_deadline_ms: Deadline = None,
    idempotency_key: IdempotencyKey = None,
) -> Inference:
    """The request, on guarded routes."""
    completions = platform_of(request).completions
    return Inference(request, principal_of(request), completions, x_loramux_deadline_ms, idempotency_key)
