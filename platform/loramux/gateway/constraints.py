"""Formats that callers ask for, tried in a limited process and kept by tenant."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from loramux.constraints import TrialJob, TrialResult, TrialSetup
from loramux.engine.messages import ModelFacts
from loramux.engine.request import Constraint
from loramux.gateway.errors import InvalidRequest, Unavailable
from loramux.gateway.formats import Format
from loramux.gateway.messages import GenerationRequest
from loramux.gateway.tokenizer import Tokenizer
from loramux.threads import TenantSlots, ThreadPool
from loramux.validation.sandbox import JobLimits, Sandbox, SandboxDied, SandboxError

MAX_BYTES = 256 << 10
"""The largest format, as JSON."""
MAX_KEPT_OF_TENANT = 64
MAX_KEPT = 2048
"""Results that are kept, over all tenants."""
PROCESSES = 2
LIMITS = JobLimits(memory_bytes=256 << 20, cpu_seconds=0.75, wall_seconds=2.0)

CODE = "invalid_constraint"


class _Key(NamedTuple):
    tenant: str
    job: bytes


class GrammarTrials:
    """Turns asked formats into constraints. Each new one is tried first, one at a time for a tenant."""

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self._setup = _setup(tokenizer, facts)
        self._sandbox = Sandbox("loramux.constraints.trial", self._setup or b"")
        self._threads = ThreadPool("grammars", PROCESSES)
        self._slots = TenantSlots(PROCESSES, 1)
        self._kept: OrderedDict[_Key, TrialResult] = OrderedDict()
        """Results, the latest used last."""

    async def constraint(self, tenant: str, asked: TrialJob, field: str) -> Constraint:
        """Return the constraint that `field` asks for. Raises InvalidRequest where the limits do not allow it."""
        if self._setup is None:
            raise InvalidRequest(
                f"'{field}' is not supported with this model's tokenizer; leave it out.",
                field=field,
                code="unsupported_parameter",
            )
        job = msgspec.json.encode(asked)
        if len(job) > MAX_BYTES:
            raise InvalidRequest(
                f"'{field}' has {len(job)} bytes, and at most {MAX_BYTES} are allowed. Send a smaller one.",
                field=field,
                code=CODE,
            )
        result = await self._result(_Key(tenant, job))
        if result.refusal is not None:
            raise InvalidRequest(
                f"'{field}' cannot be enforced: {result.refusal}. Simplify it, or leave it out.",
                field=field,
                code=CODE,
            )
        return Constraint(grammar=result.grammar, field=field)

    async def constraint_of(
        self, tenant: str, format: Format, asked: GenerationRequest, prompt_tail: str | None
    ) -> Constraint | None:
        """Return what every answer of a request follows; None: nothing. Raises InvalidRequest."""
        use = asked.chat.tools
        if use is None and asked.format is None:
            return None
        job = TrialJob(
            format=asked.format.format if asked.format else None,
            tools=format.tool_grammar(use) if use else None,
        )
        field = asked.format.field if asked.format else "tools"
        return format.behind_thought(await self.constraint(tenant, job, field), prompt_tail)

    def close(self) -> None:
        """End the process and the threads."""
        self._sandbox.close()
        self._threads.close()

    async def _result(self, key: _Key) -> TrialResult:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        async with self._slots.slot(key.tenant):
            if key not in self._kept:  # a request beside this one may have tried the same
                self._keep(key, await self._threads.run(self._try, key.job))
        return self._kept[key]

    def _try(self, job: bytes) -> TrialResult:
        try:
            return msgspec.json.decode(self._sandbox.run(job, LIMITS).value, type=TrialResult)
        except SandboxDied:
            raise Unavailable("Formats cannot be checked at this moment. Please retry.", code="server_busy") from None
        except SandboxError:
            return TrialResult(refusal=f"it takes more than {LIMITS.cpu_seconds} seconds or too much memory to compile")

    def _keep(self, key: _Key, result: TrialResult) -> None:
        self._kept[key] = result
        own = [one for one in self._kept if one.tenant == key.tenant]
        if len(own) > MAX_KEPT_OF_TENANT:
            del self._kept[own[0]]
        elif len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _setup(tokenizer: Tokenizer, facts: ModelFacts) -> bytes | None:
    """Return the vocabulary for the trials; None where grammars cannot read it."""
    if (serialized := tokenizer.serialized) is None:
        return None
    vocabulary = TrialSetup(tokenizer=serialized, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
    return msgspec.json.encode(vocabulary)
