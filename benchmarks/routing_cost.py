"""Time that a server takes to route a request, and memory of the engines' reports.

    python benchmarks/routing_cost.py [--engines 64] [--adapters 10000] [--requests 20000] [--prompt 512]

A request is routed to one of `--engines` engines whose statistics arrive once a second, with the residency and the
digests of cached beginnings that full engines report. Adapters are popular by Zipf 1.0. `digests` is the time for the
digests of a prompt of `--prompt` tokens, `route` that for the choice and for the notes of the request's course, and
`views` that for taking the statistics, divided by the requests. The figures are microseconds of processor time, means
over all requests, so that rare work (moves, forgetting) is in them. The result is JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from array import array
from typing import Any

import msgspec
import numpy as np

from loramux.engine.memory.prefix_digests import identity_mask, prefix_digests
from loramux.engine.messages import AdapterRef, EngineStats, Request, RoutingFacts, SamplingParams
from loramux.engine.statistics import REPORTED_PREFIXES
from loramux.fleet.router import Router
from loramux.fleet.view import EngineState, RoutingRequest, view_of
from loramux.simulator.scenario import choose

BLOCK, REQUESTS_PER_S, RESIDENT, IN_FLIGHT = 16, 2000, 500, 40


def report(rng: random.Random, adapters: int, known: list[int]) -> bytes:
    """Return the encoded statistics of a full engine."""
    facts = RoutingFacts(
        resident={f"adapter {number}": 40 for number in rng.sample(range(adapters), min(adapters, RESIDENT))},
        prefixes=array("Q", known[:REPORTED_PREFIXES]).tobytes(),
        queue_tokens=2000,
        max_running=128,
        prefill_tokens_per_s=20_000.0,
        step_s=0.012 + 0.006 * rng.random(),
        page_s=1e-6,
    )
    stats = EngineStats(
        running=IN_FLIGHT, pages_total=20_000, pages_kv=2000, adapter_loads=9, adapter_load_seconds=0.9, routing=facts
    )
    return msgspec.msgpack.encode(stats)


def measure(engines: int, adapters: int, requests: int, prompt: int) -> dict[str, Any]:
    """Route the requests; return microseconds a request, and megabytes."""
    rng = random.Random(0)
    numbers = choose(np.random.default_rng(0), requests, "zipf:1.0", adapters).tolist()
    known = [rng.getrandbits(64) for _ in range(REPORTED_PREFIXES)]
    reports = [report(rng, adapters, known) for _ in range(engines)]
    decoder = msgspec.msgpack.Decoder(EngineStats)
    tracemalloc.start()
    facts = [decoder.decode(encoded).routing for encoded in reports]
    views = [view_of(f"e{n}", "base", EngineState.READY, decoder.decode(reports[n]), 0.0) for n in range(engines)]
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    for one in facts:
        assert len(one.prefixes) == 8 * REPORTED_PREFIXES
    before = tracemalloc.get_traced_memory()[0]
    digests_only = [frozenset(array("Q", one.prefixes)) for one in facts]
    digest_megabytes = (tracemalloc.get_traced_memory()[0] - before) / 1e6
    tracemalloc.stop()
    del digests_only
    router, seen, opened = Router(), tuple(views), []
    spent = {"digests": 0.0, "route": 0.0, "views": 0.0}
    clock = time.thread_time
    for number, adapter in enumerate(numbers):
        now = number / REQUESTS_PER_S
        engine = number % engines
        if number % max(1, REQUESTS_PER_S // engines) == 0:
            began = clock()
            stats = decoder.decode(reports[engine])
            views[engine] = view_of(f"e{engine}", "base", EngineState.READY, stats, now)
            seen = tuple(views)
            spent["views"] += clock() - began
        tokens = [adapter, *range(prompt - 1)]
        request = Request(
            id=str(number),
            tenant=f"tenant {adapter % 1000}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=100),
            adapter=AdapterRef(f"adapter {adapter}", ""),
        )
        began = clock()
        digests = prefix_digests(b"key", request.tenant, tokens, BLOCK)
        request = msgspec.structs.replace(request, prefix_digests=digests)
        routed = RoutingRequest.of(request, BLOCK)
        hashed = clock()
        chosen = router.choose(routed, seen, now)
        assert chosen is not None
        router.sent(routed, chosen, now)
        router.started(routed.id, now)
        opened.append(routed.id)
        if len(opened) > engines * IN_FLIGHT:
            router.ended(opened.pop(0), now)
        ended = clock()
        spent["digests"] += hashed - began
        spent["route"] += ended - hashed
    identity_mask.cache_clear()
    figures = {f"{name}_us": round(1e6 * seconds / requests, 1) for name, seconds in spent.items()}
    return figures | {
        "moves": router.num_moves,
        "reports_mb": round(megabytes, 1),
        "digests_mb": round(digest_megabytes, 1),
        "report_kb": round(len(reports[0]) / 1e3, 1),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    asked = parser.parse_args()
    print(json.dumps(measure(asked.engines, asked.adapters, asked.requests, asked.prompt), indent=2))


if __name__ == "__main__":
    main()
