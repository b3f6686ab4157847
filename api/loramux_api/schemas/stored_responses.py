"""Stored responses: their form in the store, and how a later request refers to them.

A response is stored as two texts: the items of its input and output, and all other fields. The id of an item contains
the id of its response. `msg_<response><place>` is an item of the output. `msg_<response>i<place>` is an item of the
input that was sent without an id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from loramux.serving.errors import InvalidRequest, ItemNotFound
from loramux_api.schemas.conversation import MAX_MESSAGES
from loramux_api.schemas.responses import InputItem, ResponseBody, is_reference

PREFIX = "resp_"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
"""Prefixes of items' ids by type. The id of a call's output has the prefix of the call, followed by an `o`."""
_item_id = re.compile(r"[a-z]{2,4}_(?P<response>[0-9a-f]{32})i?[0-9]{1,5}")


class StoredItems(msgspec.Struct):
    """The items of a response, all of which can be sent back as input."""

    input: list[InputItem]
    """Items that the request itself sent, with references replaced by the items that they refer to."""
    output: list[InputItem]


class WrittenItems(msgspec.Struct):
    """The same response, with the output in the form that was sent."""

    input: list[InputItem]
    output: Any


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """A response that is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def written_input(body: ResponseBody, response_id: str) -> list[InputItem]:
    """Return the items of a request's input for the store: items without an id get an id."""
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    suffix = response_id.removeprefix(PREFIX)
    return [
        item if item.id else msgspec.structs.replace(item, id=f"{_prefix(item.type)}_{suffix}i{place}")
        for place, item in enumerate(items)
    ]


def conversation_of(stored: Iterable[bytes]) -> list[InputItem]:
    """Return the items of some responses, in their order. Raises InvalidRequest if there are more items than an input
    may have.
    """
    items: list[InputItem] = []
    for one in stored:
        read = _decode(one)
        items += read.input
        items += read.output
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"The stored responses that this request continues have more than {MAX_MESSAGES} items. Begin a new "
                "conversation, with a summary for instance.",
                field="previous_response_id",
                code="context_length_exceeded",
            )
    return items


def referred_responses(body: ResponseBody) -> set[str]:
    """Return the ids of the responses that have the items that the input refers to.

    Raises ItemNotFound, and InvalidRequest for an item that is referred to twice, as OpenAI does: otherwise a short
    input could mean a large item thousands of times.
    """
    ids, seen = set[str](), dict[str, int]()
    for place, item in enumerate(_items(body)):
        if is_reference(item):
            found = _item_id.fullmatch(item.id or "")
            if item.id is None or found is None:
                raise ItemNotFound(item.id or "", f"input[{place}].id")
            if (first := seen.setdefault(item.id, place)) != place:
                raise InvalidRequest(
                    f"'input[{first}]' refers to the item '{item.id}' already. Remove the duplicate.",
                    field=f"input[{place}].id",
                    code="duplicate_item",
                )
            ids.add(PREFIX + found["response"])
    return ids


def resolve_references(body: ResponseBody, stored: Iterable[bytes]) -> None:
    """Replace references by the items that they refer to. Raises ItemNotFound."""
    found: dict[str, InputItem] = {}
    for one in stored:
        read = _decode(one)
        found |= {item.id: item for item in (*read.input, *read.output) if item.id}
    body.input = [_resolved(item, found, place) for place, item in enumerate(_items(body))]


def listed_items(stored: bytes) -> list[dict[str, Any]]:
    """Return the input items of a stored response as OpenAI's clients read them."""
    return [_listed(item) for item in _decode(stored).input]


def whole_response(items: bytes, content: bytes) -> dict[str, Any]:
    """Return a stored response in the form in which it was sent."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    fields["output"] = msgspec.json.decode(items, type=dict[str, msgspec.Raw])["output"]
    return dict(fields)


def _resolved(item: InputItem, found: Mapping[str, InputItem], place: int) -> InputItem:
    if not is_reference(item):
        return item
    if item.id is None or item.id not in found:
        raise ItemNotFound(item.id or "", f"input[{place}].id")
    return found[item.id]


def _items(body: ResponseBody) -> Sequence[InputItem]:
    return () if isinstance(body.input, str) else body.input


def _prefix(type: str) -> str:
    if type.endswith("_output"):
        return f"{_PREFIXES.get(type.removesuffix('_output'), 'it')}o"
    return _PREFIXES.get(type, "it")


def _listed(item: InputItem) -> dict[str, Any]:
    content: Any = item.content
    if item.type == "message" and isinstance(content, str):
        text: dict[str, Any] = {"type": "output_text" if item.role == "assistant" else "input_text", "text": content}
        content = [text | {"annotations": []} if item.role == "assistant" else text]
    listed = {"id": item.id, "type": item.type, "status": "completed", **msgspec.to_builtins(item)}
    if item.type == "reasoning":
        listed["summary"] = []
    return listed if content is None else listed | {"content": msgspec.to_builtins(content)}


_decode = msgspec.json.Decoder(StoredItems).decode
