"""`[adapters] preload`: pinned before the first request; what cannot be is a warning."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from peft_uploads import make_adapter
from scripted_engine import ScriptedEngine
from site_fixture import make_settings
from tiny_base import make_base
from upload_harness import upload_folder

from loramux.catalog.registry.resolver import engine_key
from loramux.common.settings.serving import AdapterLimits
from loramux.server.platform import open_platform


def test_adapters_are_preloaded_by_name_and_the_others_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(tmp_path / "base")
    folder = make_adapter(base, tmp_path / "adapter")
    settings = make_settings(base, tmp_path)
    wanted = AdapterLimits(preload=("acme/one", "acme/two", "nobody/one"))

    async def use() -> None:
        async with open_platform(settings, lambda *_: ScriptedEngine()) as platform:
            await platform.tenants.create("acme")
            acme = await platform.tenants.system_principal("acme")
            await upload_folder(platform.uploads, acme, "one", folder)
        engine = ScriptedEngine()
        async with open_platform(msgspec.structs.replace(settings, adapters=wanted), lambda *_: engine) as platform:
            info = await platform.adapters.queries.get(acme, "one")
            assert engine.pinned == [(engine_key(acme.tenant, info.digest), "")]

    asyncio.run(use())
    assert "acme/two" in caplog.text
    assert "nobody" in caplog.text
