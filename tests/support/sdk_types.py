"""The request types of the official SDKs, and the class that the decision record gives to each of their fields."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_message_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from anthropic.types.beta.messages import batch_create_params as beta_message_batch_create_params
from anthropic.types.messages import batch_create_params as message_batch_create_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params, file_create_params
from openai.types.beta import response_create_params as beta_response_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.fine_tuning import job_create_params
from openai.types.responses import input_token_count_params, response_create_params
from typing_extensions import get_type_hints, is_typeddict

RECORD = Path(__file__).parents[2] / "docs" / "decisions" / "0044-hints-and-meanings.md"
CLASSES = ("served", "hint", "no-op", "left-out", "refused")
ROOTS: dict[str, type] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
    "responses beta": beta_response_create_params.ResponseCreateParamsBase,
    "input_tokens": input_token_count_params.InputTokenCountParams,
    "messages": message_create_params.MessageCreateParamsBase,
    "messages beta": beta_message_create_params.MessageCreateParamsBase,
    "count_tokens": message_count_tokens_params.MessageCountTokensParams,
    "count_tokens beta": beta_message_count_tokens_params.MessageCountTokensParams,
    "batches": batch_create_params.BatchCreateParams,
    "message batches": message_batch_create_params.BatchCreateParams,
    "message batches beta": beta_message_batch_create_params.BatchCreateParams,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
    "fine-tuning jobs": job_create_params.JobCreateParams,
    "files": file_create_params.FileCreateParams,
}
FLAT = {ROOTS["responses beta"]}
"""Types whose parts are not read: the parts are those of Responses under other names, each with an `agent`."""
_row = re.compile(r"^\| (?P<types>[\w.*, ]+) \| (?P<class>[\w-]+) \| (?P<fields>[^|]*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """Fields of some types, and their class. `*` stands for any part of a type's name, or for all other fields."""

    types: tuple[str, ...]
    of_class: str
    fields: tuple[str, ...]

    def matches(self, kind: str) -> bool:
        return any(fnmatchcase(kind, one) for one in self.types)


def name_of(kind: type) -> str:
    """The name of a type in the record: its module within the SDK's `types`, and its own. The SDK has the types of
    Responses' items twice, which count as one.
    """
    module = kind.__module__.replace(".types", "").removesuffix("_params").removesuffix("_param")
    return f"{module.replace('response_input_item', 'response_input')}.{kind.__name__}"


def recorded() -> list[Row]:
    """The rows of the record's table."""
    rows = [
        Row(_names(found["types"]), found["class"], _names(found["fields"]))
        for found in _row.finditer(re.sub(r"\\([*_])", r"\1", RECORD.read_text()))
        if found["class"] != "class"
    ]
    assert all(row.of_class in CLASSES for row in rows)
    return rows


def _names(cell: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in cell.replace("`", "").split(","))


def class_of(rows: list[Row], kind: str, field: str) -> str | None:
    """The class of a field: of the first row that names it, else of the first row for all fields of its type."""
    of_type = [row for row in rows if row.matches(kind)]
    for name in (field, "*"):
        for row in of_type:
            if name in row.fields:
                return row.of_class
    return None


def fields_of(rows: list[Row]) -> Iterator[tuple[type, str, str | None]]:
    """Yield every field of a request type, and every field within a served field, with its class or None."""
    seen: set[type] = set()
    todo = list(ROOTS.values())
    while todo:
        kind = todo.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for field, hint in get_type_hints(kind, include_extras=True).items():
            of_field = class_of(rows, name_of(kind), field)
            yield kind, field, of_field
            if of_field in (None, "served") and kind not in FLAT:
                todo += typed_dicts(hint)


def typed_dicts(hint: object) -> Iterator[type]:
    """The TypedDicts that a type is made of."""
    if is_typeddict(hint):
        yield typing.cast(type, hint)
    for part in typing.get_args(getattr(hint, "__value__", hint)):
        yield from typed_dicts(part)
