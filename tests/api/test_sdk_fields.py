"""Every field of the official SDKs' request types has a class in the decision record, and endpoints act by it."""

from __future__ import annotations

import re

import msgspec
import pytest
from sdk_types import RECORD, ROOTS, class_of, fields_of, name_of, recorded
from typing_extensions import get_type_hints

from loramux_api.bodies import Body
from loramux_api.controllers.completions import CompletionBody
from loramux_api.schemas.batches import BatchBody
from loramux_api.schemas.chat import ChatBody
from loramux_api.schemas.message_batches import MessageBatchBody
from loramux_api.schemas.messages import CountBody, MessageBody
from loramux_api.schemas.pooling import EmbeddingBody
from loramux_api.schemas.responses import ResponseBody
from loramux_api.schemas.training import FineTuningJobBody

PAGE = RECORD.parents[1] / "no-effect.md"
BODIES: dict[str, type[Body]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponseBody,
    "responses beta": ResponseBody,
    "input_tokens": ResponseBody,
    "messages": MessageBody,
    "messages beta": MessageBody,
    "count_tokens": CountBody,
    "count_tokens beta": CountBody,
    "batches": BatchBody,
    "message batches": MessageBatchBody,
    "message batches beta": MessageBatchBody,
    "embeddings": EmbeddingBody,
    "fine-tuning jobs": FineTuningJobBody,
}


def class_in(body: type[Body], field: str) -> str | None:
    """The class that an endpoint's own tables give to a field."""
    if field in {one.encode_name for one in msgspec.structs.fields(body)}:
        return "served"
    if field in body.ignored:
        return "hint"
    if field not in body.unsupported:
        return None
    return "no-op" if len(body.unsupported[field].harmless) > 1 else "refused"


def test_every_field_of_the_sdks_has_a_class() -> None:
    without = [f"{name_of(kind)}.{field}" for kind, field, of_class in fields_of(recorded()) if of_class is None]
    assert without == [], "give them a class in docs/decisions/0044-hints-and-meanings.md"


@pytest.mark.parametrize("endpoint", BODIES)
def test_endpoint_treats_each_field_by_its_class(endpoint: str) -> None:
    rows, root = recorded(), ROOTS[endpoint]
    differing = {
        field: (class_of(rows, name_of(root), field), class_in(BODIES[endpoint], field))
        for field in get_type_hints(root)
        if class_of(rows, name_of(root), field) != class_in(BODIES[endpoint], field)
    }
    assert differing == {}


def test_page_of_what_has_no_effect_names_every_hint_of_the_record() -> None:
    text = PAGE.read_text().replace("```", "")
    named = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", text))))
    hints = {(name_of(kind), field) for kind, field, of_class in fields_of(recorded()) if of_class == "hint"}
    assert sorted(f"{kind}.{field}" for kind, field in hints if field not in named) == []


def test_new_field_of_a_served_type_has_no_class() -> None:
    assert class_of(recorded(), name_of(ROOTS["chat"]), "a_field_of_tomorrow") is None
