"""The base models that a server answers with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from loramux.engine.messages import ModelFacts
from loramux.fleet.group import EngineGroup
from loramux.fleet.member import EngineStatus, UnknownEngine
from loramux.serving.formats import Format, GrammarTrials
from loramux.serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedBase:
    """A base model as requests meet it."""

    name: str
    """In requests."""
    engines: EngineGroup
    facts: ModelFacts
    tokenizer: Tokenizer
    trials: GrammarTrials
    former_names: tuple[str, ...] = ()
    share_cache: bool = False
    """A tenant's projects find each other's KV of the base model; tenants never do."""
    tool_parser: str | None = None
    """How it writes calls of tools; None: as its chat template says."""

    @cached_property
    def format(self) -> Format:
        """What it makes of text."""
        return Format(self.tokenizer, tool_parser=self.tool_parser)

    @property
    def context(self) -> int:
        """The most tokens, prompt and answer, of a request."""
        return self.facts.context

    @cached_property
    def fingerprint(self) -> str:
        """A name for the backend, which changes when the backend does."""
        facts = self.facts
        backend = f"{version('loramux')} {facts.dtype} {facts.kv_cache_dtype} {facts.vocab_size} {facts.max_model_len}"
        return "fp_" + hashlib.sha256(backend.encode()).hexdigest()[:12]


class ServedBases(dict[str, ServedBase]):
    """The served bases by name; the first is the default. Loading and retiring changes it while requests run."""

    def of_record(self, recorded: str) -> ServedBase | None:
        """Return the base that serves what was uploaded for the base `recorded`."""
        return next((base for base in self.values() if recorded in (base.name, *base.former_names)), None)

    def engines(self) -> list[EngineStatus]:
        """Describe the engines of every base."""
        return [status for base in self.values() for status in base.engines.statuses()]

    def order_engine(self, name: str, *, restart: bool, seconds: float) -> EngineStatus:
        """Begin to drain or restart the engine of that name. Raises UnknownEngine or EngineBusy."""
        for base in self.values():
            if name in base.engines.names:
                return base.engines.order(name, restart=restart, seconds=seconds)
        names = [engine for base in self.values() for engine in base.engines.names]
        raise UnknownEngine(f"there is no engine {name[:80]!r}; there are {', '.join(names)}", "engine")
