"""Two tenants on the real engine, over HTTP, one of them flooding: each gets its share, by weight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import fairness
import pytest
from server_process import Place, served
from tiny_base import make_base

from loramux.common.settings.file import Settings, load_settings
from loramux.server.platform import open_tenants

TAU, TOKENS, ROWS = 32, 32, 4
UNITS = 1500.0
"""Over which the gap's bound, 2 * (max_service_lead + delta) = 2 * (32 + 32 + 2 * 4) = 144, is less than a tenth."""


async def make_tenants(settings: Settings) -> tuple[dict[str, str], dict[str, int]]:
    """Keys by name, weights by id."""
    async with open_tenants(settings) as tenants:
        await tenants.tiers.put("triple", "standard", 3)
        weights = {(await tenants.create(fairness.CHAT, "triple")).id: 3, (await tenants.create(fairness.FLOOD)).id: 1}
        return {name: (await tenants.create_key(name))[1] for name in (fairness.FLOOD, fairness.CHAT)}, weights


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fairness.Site]:
    base = make_base(tmp_path_factory.mktemp("base"))
    place = Place(tmp_path_factory.mktemp("server"), base).prepare()
    place.config.write_text(
        place.config.read_text().replace("max_num_batched_tokens = 64", f"max_num_batched_tokens = {TOKENS}")
        + f"[scheduler]\ntau = {TAU}\n"
    )
    place.config.write_text(place.config.read_text().replace("[engine]\n", f"[engine]\nmax_num_seqs = {ROWS}\n"))
    keys, weights = asyncio.run(make_tenants(load_settings(place.config)))
    with served(place) as server:
        yield fairness.Site(server.url, keys, weights, "tiny", prompt_tokens=16, max_tokens=200)


def test_service_is_shared_by_weight_while_one_tenant_floods(site: fairness.Site) -> None:
    received = asyncio.run(fairness.shares(site, {fairness.FLOOD: 40, fairness.CHAT: 12}, UNITS))
    assert max(received) / min(received) <= 1.1, "units over weight: 3 to 1 in tokens"
