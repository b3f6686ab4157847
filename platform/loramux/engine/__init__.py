"""One continuously batched loop that serves many adapters and the base model."""

from loramux.engine.client import EngineClient, EngineDied
from loramux.engine.mailbox import spawn_engine

__all__ = ["EngineClient", "EngineDied", "spawn_engine"]
