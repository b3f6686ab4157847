"""Measures what the server's own process costs: a real server with the measured engine, and a client over HTTP."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import click
import httpx
import msgspec

from loramux.common import logs
from loramux.common.settings.file import Settings
from loramux.common.settings.server import RecordsSettings, ServerSettings
from loramux.engine.messages import StepLimits
from loramux.server.platform import open_tenants
from loramux.simulator.hardware import Front, MeasuredSteps, StepWork

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 600.0, 30.0, 0.1
ALONE = 20
"""Requests of two tokens, one after the other; the latency is measured with these. An answer's last token waits for its
ledger entry, its first does not.
"""
ROUNDS = 12
"""Rounds of as many requests of one token at once as there are streams. Requests that come together share
transactions, so that one costs less than alone.
"""
PROMPT = 16
STREAMS = 16
STREAM_SECONDS = 4.0
"""About how long the measured streams take."""
TENANT = "measurement"
TICKS = os.sysconf("SC_CLK_TCK")


def server_settings(settings: Settings, folder: Path, port: int) -> Settings:
    """Return the settings of a server whose data is in `folder` and whose database is new."""
    records = RecordsSettings(
        url=f"sqlite:///{folder / 'loramux.sqlite3'}",
        blobs=str(folder / "blobs"),
        cache=str(folder / "cache"),
        pepper_file=str(folder / "pepper"),
    )
    server = ServerSettings(host=HOST, port=port)
    return msgspec.structs.replace(settings, records=records, server=server, sinks=(), issuers=())


def free_port() -> int:
    """Return a port that is not in use now."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


async def measure_front(settings: Settings, steps: MeasuredSteps, limits: StepLimits) -> Front | None:
    """Start a server of `settings`, and return what it costs; None if this system does not tell a process's time.

    `steps`: times of the engine's steps, without which a first token over HTTP would not say the server's part.
    `limits`: limits of the engine's steps.
    """
    async with open_tenants(settings) as tenants:
        await tenants.create(TENANT)
        _, key = await tenants.create_key(TENANT)
    with _running(settings) as process:
        url = f"http://{HOST}:{settings.server.port}"
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=START_SECONDS, trust_env=False) as client:
            await _wait_ready(client, process)
            return await _measure(client, process, settings, steps, min(STREAMS, limits.max_num_seqs))


async def _measure(
    client: httpx.AsyncClient, process: BaseProcess, settings: Settings, steps: MeasuredSteps, streams: int
) -> Front | None:
    assert process.pid is not None, "it runs"
    name, rng = settings.model.served_model_name, random.Random(0)  # noqa: S311  prompts without common beginnings
    step_s = steps.seconds(StepWork(streams, 2 * streams * PROMPT, 2 * streams * PROMPT, 0, 0, streams))
    limit = (settings.engine.max_model_len or steps.model.max_model_len) - PROMPT
    tokens = max(2, min(limit, round(STREAM_SECONDS / step_s)))

    async def ask(count: int) -> float:
        return await _first_token(client, name, [rng.randrange(steps.model.vocab_size) for _ in range(PROMPT)], count)

    for _ in range(5):  # the first requests of a server take longer
        await ask(2)
    waits = [await ask(2) for _ in range(ALONE)]
    before = _processor_seconds(process.pid)
    for _ in range(ROUNDS):
        await asyncio.gather(*(ask(1) for _ in range(streams)))
    between = _processor_seconds(process.pid)
    await asyncio.gather(*(ask(tokens) for _ in range(streams)))
    after = _processor_seconds(process.pid)
    if before is None or between is None or after is None:
        return None
    request_s = (between - before) / (ROUNDS * streams)
    engine_s = steps.seconds(StepWork(PROMPT, PROMPT, PROMPT * (PROMPT + 1) // 2, 0, 0, 1))
    return Front(
        token_s=max(0.0, (after - between - streams * request_s) / (streams * (tokens - 1))),
        request_s=request_s,
        latency_s=max(0.0, median(waits) - engine_s),
    )


async def _first_token(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> float:
    """Stream an answer to its end; return the seconds to its first token."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            text = (await response.aread()).decode(errors="replace")
            raise click.ClickException(f"the measured server answered {response.status_code}: {text[:300]}")
        async for line in response.aiter_lines():
            if first is None and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                first = time.perf_counter() - began
    if first is None:
        raise click.ClickException("the measured server sent no token")
    return first


def _processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process without its children; None if the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def _running(settings: Settings) -> Iterator[BaseProcess]:
    """Run the server in a separate process, and stop it at the end."""
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(settings,))
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(settings: Settings) -> None:
    from loramux_api.process import exit_now
    from loramux_api.server import serve

    logs.configure(settings.logging.format, "error")
    exit_now(serve(settings, lambda _: None))


async def _wait_ready(client: httpx.AsyncClient, process: BaseProcess) -> None:
    ends_at = time.monotonic() + START_SECONDS
    while True:
        try:
            if (await client.get("/health/ready")).is_success:
                return
        except httpx.TransportError:
            pass
        if process.exitcode is not None:
            raise click.ClickException(f"the measured server ended with exit code {process.exitcode}; its log says why")
        if time.monotonic() > ends_at:
            raise click.ClickException(f"the measured server was not ready within {START_SECONDS:.0f} seconds")
        await asyncio.sleep(POLL_SECONDS)
