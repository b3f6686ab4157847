"""Conversations and tools, as all chat endpoints share them.

OpenAI's Responses and Anthropic's Messages have a list of items or blocks where a chat template has turns: one turn of
the assistant holds its thought, its text and its calls, and the result of a call is a turn of its own
(`ConversationBuilder`). Their refusals name fields in the words of their own API (`renamed_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loramux.common.errors import LoramuxError
from loramux.constraints.tools import Tool, ToolUse
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Conversation, Message

MAX_TOOLS = 128
MAX_MESSAGES = 4096
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
"""Variables of chat templates that `chat_template_kwargs` cannot set."""
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    """A function that an answer may call.

    Chat templates get what was sent: a null more would be a prompt that no trainer has written.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments; absent: it takes none."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""


class ToolDefinition(msgspec.Struct):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionChoice(msgspec.Struct):
    """The function that must be called."""

    name: FunctionName


class NamedToolChoice(msgspec.Struct):
    """The order to call one function."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an answer makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(msgspec.Struct, kw_only=True):
    """The news of a call's function."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The news of a call: its id and name first, then its arguments as they come."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunctionDelta


def tool_use(tools: list[ToolDefinition], choice: ToolChoice | None, *, parallel: bool) -> ToolUse | None:
    """Return what an answer may call; None: nothing. Raises InvalidRequest."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have one name; give each its own.", field="tools", code="invalid_value")
    if isinstance(choice, NamedToolChoice):
        wanted = choice.function.name
        if wanted not in names:
            message = f"'tool_choice' names '{wanted}', and 'tools' has no function of that name."
            raise InvalidRequest(message, field="tool_choice", code="invalid_value")
        tools = [tool for tool in tools if tool.function.name == wanted]
    elif choice == "required" and not tools:
        raise InvalidRequest("'tool_choice' is required, and 'tools' is empty.", field="tool_choice")
    elif choice == "none" or not tools:
        return None
    return ToolUse(
        tools=tuple(_tool(tool.function) for tool in tools),
        is_required=choice not in (None, "auto"),
        is_parallel=parallel and not isinstance(choice, NamedToolChoice),
    )


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(name=function.name, parameters=function.parameters, strict=bool(function.strict))


class ConversationBuilder:
    """Collects parts in their order and joins them into turns."""

    def __init__(self) -> None:
        self._turns: list[Message] = []
        self._answer: _AssistantTurn | None = None
        """The assistant's turn that the latest parts belong to."""
        self._called: dict[str, str] = {}
        """Names of the called functions, by the ids of their calls."""

    def add_turn(self, role: str, text: str) -> None:
        """Add a turn of `role`. Instructions at the beginning are one turn: many templates take no more."""
        self._end_answer()
        if role == "system" and len(self._turns) == 1 and self._turns[0].role == "system":
            text = f"{self._turns.pop().content}\n\n{text}"
        self._turns.append(Message(role, text))

    def add_thought(self, text: str) -> None:
        """Add a thought of the assistant's, which begins a turn behind a text or a call."""
        if self._answer is not None and (self._answer.texts or self._answer.calls):
            self._end_answer()
        self._open_answer().thoughts.append(text)

    def add_text(self, text: str, *, begins_turn: bool = False) -> None:
        """Add a text of the assistant's to its turn; behind a call it begins one."""
        if self._answer is not None and (self._answer.calls or (begins_turn and self._answer.texts)):
            self._end_answer()
        self._open_answer().texts.append(text)

    def add_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add a call of a function to the assistant's turn."""
        self._called[id] = name
        self._open_answer().calls.append(call_fields(id, name, arguments))

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self._end_answer()
        fields = {"tool_call_id": call_id}
        if call_id in self._called:
            fields["name"] = self._called[call_id]
        self._turns.append(Message("tool", text, fields, json_size(fields)))

    def conversation(self) -> Conversation:
        """Return the turns."""
        self._end_answer()
        return tuple(self._turns)

    def _open_answer(self) -> _AssistantTurn:
        if self._answer is None:
            self._answer = _AssistantTurn()
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._turns.append(self._answer.message())
            self._answer = None


class _AssistantTurn:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> Message:
        fields: dict[str, Any] = {}
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.thoughts:
            fields["reasoning_content"] = "".join(self.thoughts)
        return Message("assistant", "".join(self.texts), fields, json_size(fields))


def call_fields(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates read it: its arguments are an object, not a text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def required(part: msgspec.Struct, name: str, where: str) -> Any:
    """Return a field that parts of this kind need. Raises InvalidRequest where it is absent."""
    value = getattr(part, name)
    if value is None:
        field = f"{where}.{name}"
        raise InvalidRequest(f"Missing required parameter: '{field}'.", field=field, code="missing_required_parameter")
    return value


def decode_arguments(text: str, field: str) -> dict[str, Any]:
    """Return the arguments of a call, which are a text on the wire. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"'{field}' is a JSON object, written as a text.", field=field) from None


def caller_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as variables for the template. Raises InvalidRequest."""
    if reserved := sorted(RESERVED & (given or {}).keys()):
        field = f"chat_template_kwargs.{reserved[0]}"
        raise InvalidRequest(f"'{field}' is set by the server; leave it out.", field=field)
    return dict(given or {})


def json_size(value: Any) -> int:
    """Return the characters of a value in a template, about."""
    return len(msgspec.json.encode(value)) if value else 0


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields in refusals as the endpoint does: `names` has those of chats, and the endpoint's for them."""
    try:
        yield
    except LoramuxError as error:
        error.message = re.sub(r"'([\w.]+)(\[[^']*)?'", lambda found: _renamed(found, names), error.message)
        error.field = names.get(error.field or "", error.field)
        raise


def _renamed(found: re.Match[str], names: Mapping[str, str]) -> str:
    return f"'{names.get(found[1], found[1])}{found[2] or ''}'"
