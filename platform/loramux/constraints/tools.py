"""Calls of tools: how models of each family write them, and the grammar of an answer that may hold some.

All families write a call as a JSON object with the tool's name and its arguments. They differ in what stands around it:

    hermes    text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...</tool_call>
    llama3    {"name": ..., "parameters": {...}}; {...}
    mistral   text [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    granite   text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    phi4      text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>

The grammar puts the name before the arguments, so that a reader knows the tool before its arguments come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loramux.constraints.formats import quote, write_json


class ToolStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The texts around the calls of one family."""

    begin: str = ""
    """Before the first call; empty: the answer begins with it."""
    opening: str = ""
    separator: str
    closing: str = ""
    arguments: str = "arguments"
    """The key of a call's arguments."""
    id_characters: int = 24
    """Letters and digits of a call's id; Mistral's templates refuse any other number than 9."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens, without brackets of JSON."""
        return tuple(text for text in (self.begin, self.closing.strip("]")) if text)


STYLES: dict[str, ToolStyle] = {
    "hermes": ToolStyle(begin="<tool_call>", separator="</tool_call>\n<tool_call>", closing="</tool_call>"),
    "llama3": ToolStyle(separator=";", arguments="parameters"),
    "mistral": ToolStyle(begin="[TOOL_CALLS]", opening="[", separator=",", closing="]", id_characters=9),
    "granite": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]"),
    "phi4": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]<|/tool_call|>"),
}

_SIGNS: tuple[tuple[str, str], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama3"),
)
"""A text of a family's chat templates, and the family."""


def choose_style(template: str, chosen: str | None = None) -> ToolStyle | None:
    """Return how a model writes calls: as `chosen` (by a revision, or by the settings), or else as its template does.

    None where the template knows no tools.
    """
    if chosen is not None:
        return STYLES.get(chosen)
    if "tools" not in template:
        return None
    return next((STYLES[name] for sign, name in _SIGNS if sign in template), None)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any] | bool | None = None
    """The JSON schema of its arguments; None: it has none."""
    strict: bool = False
    """Refuse a schema with a keyword that cannot be enforced, instead of leaving that out."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    is_required: bool = False
    """The answer is a call; otherwise it may be a text too."""
    is_parallel: bool = True
    """It may make several calls."""


def write_tools(use: ToolUse, style: ToolStyle, special: dict[str, int], content: str | None = None) -> str:
    """Write the Lark grammar of an answer with calls.

    `special`: token ids of the markers that are special tokens. `content`: the grammar of an answer without a call
    (one %json); None: any text.
    """
    rules = [
        f"calls: {_text(style.opening)} call{_repeated(style, special) if use.is_parallel else ''} "
        f"{_marked(style.closing, special)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(use.tools))),
        "WS: /[ \\n\\r\\t]{1,40}/",
        "TEXT: /(.|\\n)*/",
    ]
    for number, tool in enumerate(use.tools):
        parameters = _object(tool.parameters)
        key, name = quote(quote(style.arguments)), quote(quote(tool.name))
        rules.append(f"arguments_{number}: {write_json(parameters, strict=tool.strict)}")
        rules.append(
            f'call_{number}: WS? "{{" WS? "\\"name\\"" WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS? '
            f'arguments_{number} WS? "}}" WS?'
        )
    begin = _marked(style.begin, special)
    if use.is_required:
        start = f"start: {begin} calls"
    elif content is not None:
        start = f"start: {content} | {begin} calls"
    elif not style.begin:
        start = "start: calls | /([^{](.|\\n)*)?/"
    elif style.begin in special:
        start = f"start: TEXT | TEXT {begin} calls"
    else:
        rules.append(f"head[lazy]: TEXT {quote(style.begin)}")
        start = "start: TEXT | head calls"
    return "\n".join(["%llguidance {}", start, *rules])


def _object(parameters: dict[str, Any] | bool | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are an object whatever it says."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | (parameters if isinstance(parameters, dict) else {})


def _repeated(style: ToolStyle, special: dict[str, int]) -> str:
    return f" ({_marked(style.separator, special)} call)*"


def _text(text: str) -> str:
    return f"WS? {quote(text)}" if text else ""


def _marked(text: str, special: dict[str, int]) -> str:
    """Write a text in which markers may be special tokens; blanks around them are free."""
    parts = [text]
    for marker, token_id in special.items():
        parts = [
            piece
            for part in parts
            for piece in ([part] if part.startswith("<[") else part.replace(marker, f"\0<[{token_id}]>\0").split("\0"))
        ]
    return " ".join(f"WS? {part}" if part.startswith("<[") else _text(part.strip()) for part in parts if part.strip())
