"""The lines of training files: OpenAI's chat examples and preferences, read as the chat endpoint reads a request."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Conversation, GenerationRequest
from loramux.training.examples import Example, ExampleFormat, Turn
from loramux_api.bodies import decode_body, inference_body_bytes, look_through
from loramux_api.schemas import chat
from loramux_api.schemas.conversation import MAX_MESSAGES

LINE_BYTES = 1 << 10
"""Bytes of a line in addition to its conversation."""
S = TypeVar("S")


class _Conversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The part of a chat request that an example has."""

    messages: msgspec.Raw
    tools: msgspec.Raw | UnsetType = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET


class _Preference(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An example of which of two continuations is preferred."""

    input: _Conversation
    preferred_output: msgspec.Raw
    non_preferred_output: msgspec.Raw


class _Weighted(msgspec.Struct):
    """The fields of a message that decide if the model learns it."""

    role: str = ""
    weight: int | float | None = None


_Messages = Annotated[list[_Weighted], Meta(min_length=1, max_length=MAX_MESSAGES)]


def example_format(context: int) -> ExampleFormat:
    """Return the format of training files. `context`: the largest context of the served bases, in tokens."""
    return ExampleFormat(parse=parse_example, max_line_bytes=inference_body_bytes(context) + LINE_BYTES)


def parse_example(data: bytes) -> Example:
    """Parse a line. Raises InvalidRequest."""
    try:
        data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("this line is not UTF-8; save the file with this encoding", "file") from None
    for _ in look_through(data):
        pass
    return _preference(data) if b'"preferred_output"' in data and _is_preference(data) else _chat(data)


def _is_preference(data: bytes) -> bool:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return False
    return "preferred_output" in fields and "messages" not in fields


def _chat(data: bytes) -> Example:
    line = _decoded(data, _Conversation)
    asked = _request(line, bytes(line.messages))
    turns = _turns(_conversation(asked), bytes(line.messages), "messages")
    if turns[-1].role != "assistant":
        raise InvalidRequest(
            f"'messages' ends with the assistant's message, which the model learns; it ends with '{turns[-1].role}'",
            "messages",
        )
    if not any(turn.is_learned for turn in turns):
        raise InvalidRequest(
            "'messages' has no message to learn: give an assistant's message no 'weight', or 1", "messages"
        )
    return Example(turns=turns, variables=_variables(asked))


def _preference(data: bytes) -> Example:
    line = _decoded(data, _Preference)
    asked = bytes(line.input.messages)
    whole = [_joined(asked, bytes(output)) for output in (line.preferred_output, line.non_preferred_output)]
    requests = [_request(line.input, messages) for messages in whole]
    shared = len(_weights(asked, "input.messages"))
    preferred, rejected = (_conversation(asked) for asked in requests)
    for name, turns in (("preferred_output", preferred), ("non_preferred_output", rejected)):
        if [turn.role for turn in turns[shared:]] != ["assistant"]:
            raise InvalidRequest(f"'{name}' is a list of one assistant's message", name)
    if preferred == rejected:
        raise InvalidRequest("'preferred_output' and 'non_preferred_output' are the same", "preferred_output")
    first, second = (
        tuple(Turn(one.role, one.content, dict(one.fields), number >= shared) for number, one in enumerate(turns))
        for turns in (preferred, rejected)
    )
    return Example(turns=first, rejected=second[shared:], num_shared=shared, variables=_variables(requests[0]))


def _decoded(data: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"{str(error)[:200]}. A line is {{messages, tools}}, or a preference: {{input, preferred_output, "
            "non_preferred_output}",
            "file",
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"this line is not valid JSON: {str(error)[:200]}", "file") from None


def _request(line: _Conversation, messages: bytes) -> GenerationRequest:
    """Return the chat request that has these messages and tools. Raises InvalidRequest."""
    tools = b"" if isinstance(line.tools, UnsetType) else b',"tools":' + bytes(line.tools)
    return chat.to_request(decode_body(b'{"model":"","messages":' + messages + tools + b"}", chat.ChatBody))


def _conversation(asked: GenerationRequest) -> Conversation:
    (conversation,) = asked.prompts
    assert isinstance(conversation, tuple)
    for turn in conversation:
        for _, image in turn.images:
            raise InvalidRequest(
                f"'{image.where}' is of the type '{image.type}', and models are trained on text only. Leave it out",
                image.where,
            )
    return conversation


def _variables(asked: GenerationRequest) -> dict[str, object]:
    return dict(asked.chat.template)


def _turns(conversation: Conversation, messages: bytes, where: str) -> tuple[Turn, ...]:
    weights = _weights(messages, where)
    assert len(weights) == len(conversation), "a message is one turn"
    turns = []
    for number, (message, given) in enumerate(zip(conversation, weights, strict=True)):
        is_answer = message.role == "assistant"
        is_learned = is_answer and given.weight != 0
        if is_learned and not message.content and not message.fields:
            raise InvalidRequest(
                f"'{where}[{number}]' has neither 'content' nor 'tool_calls': there is nothing to learn. Write one, or "
                "set its 'weight' to 0",
                f"{where}[{number}]",
            )
        turns.append(Turn(message.role, message.content, dict(message.fields), is_learned))
    return tuple(turns)


def _weights(messages: bytes, where: str) -> list[_Weighted]:
    weights = _decoded(messages, _Messages)
    for number, one in enumerate(weights):
        if one.weight is not None and (one.role != "assistant" or one.weight not in (0, 1)):
            field = f"{where}[{number}].weight"
            raise InvalidRequest(f"'{field}' is 0 or 1, and only an assistant's message has it", field)
    return weights


def _joined(first: bytes, second: bytes) -> bytes:
    """Return one list of the messages of two. Raises InvalidRequest."""
    lists = [_decoded(messages, list[msgspec.Raw]) for messages in (first, second)]
    return msgspec.json.encode([*lists[0], *lists[1]])
