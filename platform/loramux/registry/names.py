"""`tenant/adapter`, `tenant/adapter:alias`, `tenant/adapter@3`."""

from __future__ import annotations

import re

import msgspec

from loramux.records.names import GRAMMAR, GRAMMAR_IN_WORDS, is_name
from loramux.registry.errors import SHOWN, InvalidName

_model = re.compile(rf"({GRAMMAR})/({GRAMMAR})(?::({GRAMMAR})|@([1-9][0-9]{{0,8}}))?")


class ModelName(msgspec.Struct, frozen=True):
    """What a caller wrote in `model`, taken apart; at most one of `alias` and `number` is given."""

    tenant: str
    adapter: str
    alias: str | None = None
    number: int | None = None


def parse_model(text: str) -> ModelName | None:
    """The parts of an adapter's model name; None when it cannot be one."""
    match = _model.fullmatch(text)
    if match is None:
        return None
    tenant, adapter, alias, number = match.groups()
    return ModelName(tenant, adapter, alias, int(number) if number else None)


def adapter_part(tenant_name: str, name: str) -> str | None:
    """`adapter` of `adapter` or `tenant/adapter`; None when it is malformed or another tenant's."""
    owner, slash, rest = name.partition("/")
    if slash and owner != tenant_name:
        return None
    adapter = rest if slash else owner
    return adapter if is_name(adapter) else None


def check_adapter_name(tenant_name: str, name: str, served_model_name: str) -> str:
    """The adapter part of a name to upload under; raises InvalidName with the grammar."""
    adapter = adapter_part(tenant_name, name)
    if adapter is None:
        raise InvalidName(
            f"`{name[:SHOWN]}` is no name for an adapter of yours: write ADAPTER or {tenant_name}/ADAPTER, "
            f"where ADAPTER is {GRAMMAR_IN_WORDS} ({GRAMMAR})",
            "name",
        )
    if f"{tenant_name}/{adapter}" == served_model_name:
        raise InvalidName(f"`{served_model_name}` is the base model's name; choose another", "name")
    return adapter
