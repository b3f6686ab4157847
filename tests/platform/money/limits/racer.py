"""One of several processes that ask for the same limits at the same time: `racer.py URL NUMBER`.

For every line on stdin, which is a race as JSON, it opens requests as fast as it can, settles those that are admitted,
and prints what became of them as JSON. Its clock stands still.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.money.limits.errors import LimitReached
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

sys.path.append(str(Path(__file__).parents[3] / "support"))
from flat_prices import FlatPrices

T0 = 1_700_000_000_000_000


async def attempt(usage: UsageService, race: dict[str, Any], id: str, size: int) -> int:
    """Tokens used; 0 when it was refused."""
    request = OpenedRequest(
        id=id,
        tenant_id=race["tenant"],
        key_id=race["key"],
        project_id=race["project"],
        tier="standard",
        model="tiny",
        adapter_digest=None,
        prompt_tokens=size,
        max_tokens=size,
    )
    try:
        await usage.open(request)
    except LimitReached:
        return 0
    output = 0 if race["settle"] == "half" else size
    delivered = TokenCounts(prompt=size, output=output)
    if race["settle"] != "never":
        end = Settlement(request_id=id, ended_by="completion", finish_reason="stop", delivered=delivered)
        await usage.settle(end)
    return size + output


async def main(url: str, number: str) -> None:
    database = Database(url, clock=lambda: T0)
    usage = UsageService(database, FlatPrices(1, 1))
    await usage.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        race = json.loads(line)
        sizes = [1 + index % race["sizes"] for index in range(race["requests"])]
        ids = [f"{race['name']}-{number}-{index}" for index in range(race["requests"])]
        used = await asyncio.gather(*(attempt(usage, race, id, size) for id, size in zip(ids, sizes, strict=True)))
        admitted = sum(tokens > 0 for tokens in used)
        print(json.dumps({"admitted": admitted, "refused": len(used) - admitted, "used": sum(used)}), flush=True)
    await usage.stop()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
