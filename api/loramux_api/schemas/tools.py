"""Tools of a chat: what a request offers, and the calls that an answer makes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loramux.constraints import Tool, ToolUse
from loramux.gateway import InvalidRequest

MAX_TOOLS = 128
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
