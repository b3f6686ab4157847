"""A server whose base knows tools and thoughts, with an engine that says what a test writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from constrained_site import TOOLS_TEMPLATE
from running_server import running
from scripted_engine import EOS, FACTS, ScriptedEngine
from site_fixture import Site, make_keys, make_settings
from tiny_base import byte_tokenizer, make_base

from loramux.common.settings.server import PrivacySettings
from loramux_api.app import create_app


@contextmanager
def chat_site(
    folder: Path,
    chat_template: str = TOOLS_TEMPLATE,
    *,
    thinks: bool = False,
    context: int = 4096,
    response_seconds: int = 0,
) -> Iterator[Site]:
    """`thinks`: the vocabulary has a token each for the ends of a thought. `response_seconds`: responses are stored."""
    base = make_base(folder / "base", chat_template, context=context)
    if thinks:
        tokenizer = byte_tokenizer(chat_template)
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.save_pretrained(base)
    privacy = PrivacySettings(response_seconds=response_seconds)
    settings = msgspec.structs.replace(make_settings(base, folder), privacy=privacy)
    engine = ScriptedEngine(facts=msgspec.structs.replace(FACTS, max_model_len=context, pages_total=context // 4))
    with running(create_app(settings, cast(Any, engine)), "granian") as server:
        yield Site(server, engine, settings, make_keys(settings))


def say(site: Site, text: str) -> None:
    """Have the engine answer every request with `text`, from now on."""
    site.engine.requests.clear()
    site.engine.script = lambda _: [*text.encode(), EOS]


def prompts(site: Site) -> list[str]:
    """The prompts that the engine has got since `say`, as text."""
    return [bytes(t for t in one.prompt_token_ids if t < EOS).decode() for one in site.engine.requests]
