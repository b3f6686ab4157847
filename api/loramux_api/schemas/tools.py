"""Tools of a request, in the form that the three chat endpoints share: for the model, and for the caller.

A model calls functions: a name, and arguments as an object. Four kinds of tools become functions in the request, and
the answer contains their calls in the form that the caller expects (`OfferedTool`):

    function     unchanged
    custom       a function with one text, `input`, which a grammar may restrict
    namespace    its functions, each under the name `namespace__function`
    tool_search  a function that finds more tools, if the caller runs it itself (`execution: client`)

A tool of any other type is run by OpenAI's or Anthropic's servers themselves (a web search, a sandbox). This server
runs no tools. So it leaves such a tool out of the request, reports it, and offers all other tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loramux.constraints.tools import Tool, ToolUse
from loramux.serving.errors import InvalidRequest
from loramux_api.schemas.bounds import Fields, Name, Text
from loramux_api.unknown_fields import misspelling_of

MAX_TOOLS = 4096
MAX_TOOLS_BYTES = 512 << 10
"""Maximum number of bytes of a request's tools as JSON: many small tools, or few with large schemas."""
MAX_GRAMMAR = 64 << 10
"""Maximum number of characters of a custom tool's grammar."""
MAX_LEFT_OUT = 16
"""Maximum number of tools that are left out and reported one by one."""
SEARCH = "tool_search"
"""Type of the tool that finds more tools, and the name of its function."""
INPUT = "input"
"""The argument of a custom tool's function."""
FunctionName = Annotated[str, Meta(max_length=128, pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(msgspec.Struct, omit_defaults=True):
    """A function that an answer may call.

    Chat templates get exactly the fields that were sent. An additional null would make a prompt unlike those of the
    model's training.
    """

    name: FunctionName
    description: Text | None = None
    parameters: Fields | None = None
    """The JSON schema of the function's arguments; absent: the function has no arguments."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""


class GrammarDefinition(msgspec.Struct):
    """A grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR)]


class CustomFormat(msgspec.Struct):
    """Format of a custom tool's input: any text, or a text of a grammar."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None
    """The grammar, in chats."""
    syntax: Literal["lark", "regex"] | None = None
    """Notation of the grammar, in Responses."""
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR)] | None = None
    """The grammar, in Responses."""


class CustomDefinition(msgspec.Struct):
    """A tool whose input is a text."""

    name: FunctionName
    description: Text | None = None
    format: CustomFormat | None = None


class ToolDefinition(msgspec.Struct):
    """A tool of a chat."""

    type: Name
    """`function` or `custom`. Tools of other types are left out."""
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class FunctionChoice(msgspec.Struct):
    """The tool that must be called."""

    name: FunctionName


class AllowedTool(msgspec.Struct):
    """An allowed tool, by its name."""

    type: Name
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None

    @property
    def name(self) -> str | None:
        """Name of the tool; None if the server would have to run it."""
        named = self.function or self.custom
        return named.name if named else None


class AllowedTools(msgspec.Struct):
    """The tools that may be called."""

    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class NamedToolChoice(msgspec.Struct, omit_defaults=True):
    """Choice of one tool that must be called, or of the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required", "any"] | NamedToolChoice


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool with the model's name and definition, and the caller's."""

    function: FunctionDefinition
    """Definition that the chat template gets."""
    name: str
    """Name that the caller uses."""
    kind: Literal["function", "custom", "search"] = "function"
    namespace: str | None = None
    format: CustomFormat | None = None
    """Format of a custom tool's input."""
    where: str = "tools"
    """Path of the tool in the request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Choice of the offered tools that an answer may call."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    """Names that the caller uses; None: all tools."""
    one: bool = False
    """True: the answer has exactly one call."""


ALL = Asked()


class Toolbox:
    """Offered tools of one request."""

    def __init__(self, tools: Sequence[OfferedTool]) -> None:
        """Raises InvalidRequest if two tools have one name, or if the tools have more than MAX_TOOLS_BYTES."""
        self._by_name = {tool.function.name: tool for tool in tools}
        if len(self._by_name) < len(tools):
            raise InvalidRequest("Two tools have one name; give each its own.", field="tools", code="invalid_value")
        self.template = [{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in tools]
        """The tools in the form of chat templates."""
        size = len(msgspec.json.encode(self.template))
        if size > MAX_TOOLS_BYTES:
            raise InvalidRequest(
                f"'tools' has {size} bytes of JSON, and the most is {MAX_TOOLS_BYTES}; send fewer tools, or shorter "
                "descriptions and schemas.",
                field="tools",
            )

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def find(self, called: str) -> OfferedTool | None:
        """Return the tool of a function that the model has called."""
        return self._by_name.get(called)

    def use(self, asked: Asked, *, parallel: bool) -> ToolUse | None:
        """Return the tools that an answer may call; None: none. Raises InvalidRequest."""
        if asked.mode == "none":
            return None
        chosen = list(self._by_name.values())
        if asked.names is not None:
            known = {tool.name for tool in chosen}
            if unknown := sorted(asked.names - known):
                raise InvalidRequest(
                    f"'tool_choice' names '{unknown[0][:128]}', and 'tools' has no tool of that name that this server "
                    "can offer.",
                    field="tool_choice",
                    code="invalid_value",
                )
            chosen = [tool for tool in chosen if tool.name in asked.names]
        if not chosen:
            if asked.mode == "required":
                raise InvalidRequest(
                    "'tool_choice' is required, and 'tools' is empty, or has only tools that this server does not run.",
                    field="tool_choice",
                )
            return None
        return ToolUse(
            tools=tuple(_engine_tool(tool) for tool in chosen),
            is_required=asked.mode == "required",
            is_parallel=parallel and not asked.one,
        )


NO_TOOLS = Toolbox(())


def chat_tools(tools: Iterable[ToolDefinition]) -> Iterator[OfferedTool]:
    """Yield the tools of a chat that can be offered. Raises InvalidRequest."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        match tool.type:
            case "function":
                yield offered_function(_given(tool.function, f"{where}.function"), where)
            case "custom":
                yield offered_custom(_given(tool.custom, f"{where}.custom"), where)
            case other:
                ensure_hosted(other, where)


def offered_function(function: FunctionDefinition, where: str, namespace: str | None = None) -> OfferedTool:
    """Return a function in its offered form; it may belong to a namespace. Raises InvalidRequest."""
    name = function.name if namespace is None else flat_name(namespace, function.name, where)
    seen = function if name == function.name else msgspec.structs.replace(function, name=name)
    return OfferedTool(seen, function.name, namespace=namespace, where=where)


def offered_custom(custom: CustomDefinition, where: str, namespace: str | None = None) -> OfferedTool:
    """Return a custom tool in its offered form: a function with one text. Raises InvalidRequest."""
    schema = {"type": "string"}
    function = FunctionDefinition(
        custom.name,
        custom.description,
        {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False},
    )
    offered = offered_function(function, where, namespace)
    return replace(offered, kind="custom", format=custom.format)


def offered_search(description: str | None, parameters: dict[str, Any] | None, where: str) -> OfferedTool:
    """Return the search for tools in its offered form."""
    return replace(offered_function(FunctionDefinition(SEARCH, description, parameters), where), kind="search")


def flat_name(namespace: str, name: str, where: str = "tools") -> str:
    """Return the model's name for a function of a namespace. Raises InvalidRequest."""
    return checked_name(f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}", f"{where}.name")


def checked_name(name: str, where: str) -> str:
    """Return the name of a function. Raises InvalidRequest."""
    try:
        return msgspec.convert(name, FunctionName)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"Invalid value for '{where}': '{name[:160]}'. A tool's name, with that of its namespace, has 1 to 128 "
            "letters, digits, '_', '.' and '-'.",
            field=where,
            code="invalid_value",
        ) from None


def ensure_hosted(type: str, where: str, known: Sequence[str] = ("function", "custom")) -> None:
    """Raise InvalidRequest if a type is a misspelling of one that can be offered."""
    if (meant := misspelling_of(type, known)) is not None:
        raise InvalidRequest(
            f"Invalid value for '{where}.type': '{type[:40]}'. Did you mean '{meant}'?",
            field=f"{where}.type",
            code="invalid_value",
        )


def left_out_tools(types: Iterable[tuple[str, str]], offered: Iterable[str]) -> Iterator[str]:
    """Yield reports of the tools, or of the records of their calls, that are left out. `types` has the path and type of
    each, `offered` the paths of those that are offered.
    """
    known = set(offered)
    out = [f"{where} ({type[:40]})" for where, type in types if where not in known]
    yield from out[:MAX_LEFT_OUT]
    if len(out) > MAX_LEFT_OUT:
        yield f"{len(out) - MAX_LEFT_OUT} more"


def chat_choice(choice: ToolChoice | None) -> Asked:
    """Return the choice that a chat's `tool_choice` asks for. Raises InvalidRequest."""
    match choice:
        case None:
            return ALL
        case "none" | "auto" | "required":
            return Asked(choice)
        case "any":
            return Asked("required")
        case NamedToolChoice(type="allowed_tools"):
            allowed = _given(choice.allowed_tools, "tool_choice.allowed_tools")
            return Asked(allowed.mode, frozenset(tool.name for tool in allowed.tools if tool.name is not None))
        case NamedToolChoice(type="custom"):
            return one_tool(_given(choice.custom, "tool_choice.custom").name)
        case NamedToolChoice():
            return one_tool(_given(choice.function, "tool_choice.function").name)
    raise AssertionError("msgspec has checked the type")


def one_tool(name: str) -> Asked:
    """Return the choice of one tool that must be called."""
    return Asked("required", frozenset({name}), one=True)


def _engine_tool(tool: OfferedTool) -> Tool:
    function = tool.function
    if tool.kind == "function" or function.parameters is None:
        return Tool(name=function.name, parameters=function.parameters, strict=bool(function.strict))
    grammar = _grammar(tool)
    if grammar is None or grammar.syntax == "lark":
        return Tool(
            name=function.name,
            parameters=function.parameters,
            strict=True,
            grammar=None if grammar is None else grammar.definition,
        )
    text = {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
    return Tool(name=function.name, parameters=function.parameters | {"properties": {INPUT: text}}, strict=True)


def _grammar(tool: OfferedTool) -> GrammarDefinition | None:
    format = tool.format
    if format is None or format.type == "text":
        return None
    if format.grammar is not None:
        return format.grammar
    syntax = _given(format.syntax, f"{tool.where}.format.syntax")
    return GrammarDefinition(syntax, _given(format.definition, f"{tool.where}.format.definition"))


def _given(value: Any, where: str) -> Any:
    """Return a field that this kind of tool needs. Raises InvalidRequest if the field is absent."""
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{where}'.", field=where, code="missing_required_parameter")
    return value
