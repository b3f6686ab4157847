"""One continuously batched loop that serves many adapters and the base model.

    client (event loop)  <- messages ->  worker (thread or process)  ->  engine.step():
        scheduling.plan()      which tokens of which sequences run next, under one budget of pages
        pipeline.advance()     execution launches the step's kernels; tokens come back
        scheduling.commit()    tokens are appended, ended sequences free their pages
        -> StepReport          one message a step: every request's event, once a second the statistics

`scheduling` decides, `memory` holds pages (KV, adapters, prefix cache, swap), `execution` computes, `metrics` counts.
Each folder's docstring explains its algorithms. Imports run downwards: client, worker, engine, pipeline, execution,
scheduling, memory, messages.
"""

from loramux.engine.client import ENGINE_DIED, EngineClient, EngineDied, spawn_engine

__all__ = ["ENGINE_DIED", "EngineClient", "EngineDied", "spawn_engine"]
