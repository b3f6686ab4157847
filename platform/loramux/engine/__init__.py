"""One continuously batched loop that serves many adapters and the base model.

    client (event loop)  <- messages ->  worker (thread or process)  ->  Engine.step():
        scheduler.plan()       which tokens of which sequences run next, under one budget of pages
        pipeline.advance()     execution launches the step's kernels; tokens come back
        scheduler.commit()     tokens are appended, ended sequences free their pages
        -> StepReport          one message a step: every request's event, once a second the statistics

A step is one forward pass. A step computes one token of every sequence that decodes, and as many tokens of prompts as
the step's budget has left. So a request joins between any two steps and leaves with its last token, independently of
other requests. Rows of the base and of many adapters share one pass over the base's weights. KV and adapters are in one
pool of equal pages. When a new page is needed, the page with the lowest value is evicted.

    client                  the serving layer's end: requests in, events out, wherever the engine runs
    worker                  the loop around the engine, on a thread or in a separate process
    engine                  the step, and the two ways to run steps one after the other
    statistics              usage by request, service by tenant, one snapshot of all counters
    execution               one step through the model: forward, sampling; the ranks; loading
    scheduling              which sequences run in the next step
    memory                  pages: KV, adapters, prefix cache, swap
    messages                the protocol between the serving layer and the engine
    metrics                 every counter in one place

Imports run downwards in this order. The docstrings of `scheduling`, `memory` and `execution` explain their algorithms.
"""
