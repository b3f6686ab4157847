"""Calls of tools: the notation of each family of models, and the grammar of an answer that may contain calls.

Most families write a call as a JSON object with the tool's name and its arguments, and differ in the text around it:

    hermes    text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...</tool_call>
    llama3    {"name": ..., "parameters": {...}}; {...}
    mistral   text [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    granite   text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    phi4      text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>

Other families have their own notation, which `notations` describes:

    mistral_args     text [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]...         Mistral, since tokenizer v11
    pythonic         [name(key="value", days=3, exact=True), ...]          Llama 3.2 and 4
    qwen3_coder      text <tool_call><function=name><parameter=city>Paris</parameter>...</function></tool_call>
    functiongemma    text <start_function_call>call:name{key:<escape>value<escape>, ...}<end_function_call>
    gemma4           text <|tool_call>call:name{city:<|"|>Paris<|"|>,days:3,exact:true}<tool_call|>

The grammar puts the name before the arguments, so that a reader knows the tool before its arguments arrive. The
arguments come in the order of the schema. A part of a schema that a notation cannot enforce is left out, or refused if
the tool is `strict`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loramux.constraints.escaped import escape_grammar
from loramux.constraints.notations import (
    ArgumentsWriter,
    GemmaWriter,
    PythonWriter,
    XmlWriter,
    argument_kinds,
    object_of,
    without,
)
from loramux.constraints.schemas import SchemaFault
from loramux.constraints.values import DEFAULT, Spelling, quote, write_value

Notation = Literal["json", "bare", "python", "xml", "gemma"]


class ToolStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Texts around the calls of one model family."""

    begin: str = ""
    """Text before the first call; empty if the answer begins with the call."""
    opening: str = ""
    separator: str
    closing: str = ""
    arguments: str = "arguments"
    """Key of a call's arguments."""
    notation: Notation = "json"
    """Notation of a call. `bare`: the tool's name, `middle`, and the arguments as JSON."""
    middle: str = ""
    mark: str = ""
    """Mark before and after a text, in Gemma's notation."""
    id_characters: int = 24
    """Number of letters and digits of a call's id. Mistral's templates refuse any number except 9."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be separate tokens, without the brackets of JSON."""
        return tuple(text for text in (self.begin, self.middle, self.mark, self.closing.strip("]")) if text)

    @property
    def first(self) -> str:
        """First character of an answer that consists of calls, if the style has no text before them."""
        return "[" if self.notation == "python" else "{"

    def heads(self, use: ToolUse) -> tuple[str, ...]:
        """Return the texts, without blanks, with which an answer of calls begins if the style has no text before
        them. An answer that begins otherwise is a text, even if it begins with the same character.
        """
        if self.notation == "python":
            return tuple(f"{self.first}{tool.name}(" for tool in use.tools)
        return tuple(f'{self.first}"name":"{tool.name}","{self.arguments}":' for tool in use.tools)


STYLES: dict[str, ToolStyle] = {
    "hermes": ToolStyle(begin="<tool_call>", separator="</tool_call>\n<tool_call>", closing="</tool_call>"),
    "llama3": ToolStyle(separator=";", arguments="parameters"),
    "mistral": ToolStyle(begin="[TOOL_CALLS]", opening="[", separator=",", closing="]", id_characters=9),
    "granite": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]"),
    "mistral_args": ToolStyle(
        begin="[TOOL_CALLS]", separator="[TOOL_CALLS]", middle="[ARGS]", notation="bare", id_characters=9
    ),
    "pythonic": ToolStyle(opening="[", separator=",", closing="]", notation="python"),
    "qwen3_coder": ToolStyle(
        begin="<tool_call>", separator="</tool_call>\n<tool_call>", closing="</tool_call>", notation="xml"
    ),
    "functiongemma": ToolStyle(
        begin="<start_function_call>",
        separator="<end_function_call><start_function_call>",
        closing="<end_function_call>",
        notation="gemma",
        mark="<escape>",
    ),
    "gemma4": ToolStyle(
        begin="<|tool_call>",
        separator="<tool_call|><|tool_call>",
        closing="<tool_call|>",
        notation="gemma",
        mark='<|"|>',
    ),
    "phi4": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]<|/tool_call|>"),
}

_SPACES = r"\s\x1c-\x1f\x85"
"""White space that a reader strips from answers."""

_SIGNS: tuple[tuple[str, str], ...] = (
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<function=", "qwen3_coder"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters": ', "llama3"),
)
"""A text that occurs in the chat templates of a family, and the family."""


def choose_style(template: str, chosen: str | None = None) -> ToolStyle | None:
    """Return a model's notation of calls: `chosen` (by a revision or by the settings), otherwise the notation of its
    template.

    Return None if the template does not support tools.
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
    """JSON schema of the arguments; None if the tool has no arguments."""
    strict: bool = False
    """True: refuse a schema with a keyword that cannot be enforced. False: leave such a keyword out."""
    grammar: str | None = None
    """Lark grammar of the tool's only argument, which is a text."""

    def loosened(self) -> Tool:
        """Return the tool with any JSON object as arguments. An argument keeps only its types, so that texts are
        written as before.
        """
        parameters = object_of(self.parameters)
        properties = parameters.get("properties")
        names = properties if isinstance(properties, dict) else ()
        kept = {name: {"type": sorted(argument_kinds(parameters, name))} for name in names}
        return msgspec.structs.replace(self, parameters={"properties": kept} if kept else {})


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    is_required: bool = False
    """True if the answer must be a call. Otherwise it may also be a text."""
    is_parallel: bool = True
    """True if the answer may make several calls."""


def write_tools(
    use: ToolUse,
    style: ToolStyle,
    special: dict[str, int],
    content: tuple[str, list[str]] | None = None,
    spelling: Spelling = DEFAULT,
) -> str:
    """Write the Lark grammar of an answer with calls. Raises ValueError with the tool and the path of the part that
    fails.

    `special` has the token ids of the markers that a grammar cannot match as text. `content` is the expression of an
    answer without a call, and its rules; None allows any text.
    """
    rules = [
        f"calls: {_text(style.opening)} call{_repeated(style, special) if use.is_parallel else ''} "
        f"{_marked(style.closing, special)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(use.tools))),
        *spelling.prelude(),
    ]
    for number, tool in enumerate(use.tools):
        try:
            rules += _write_call(f"call_{number}", tool, style, special, spelling)
        except SchemaFault as fault:
            raise ValueError(f"tool '{tool.name}', {fault}") from None
    begin = _marked(style.begin, special)
    if use.is_required:
        start = f"start: {begin} calls"
    elif content is not None:
        start = f"start: {content[0]} | {begin} calls"
        rules += content[1]
    else:
        start = _beside_text(style, special, rules)
    return "\n".join(["%llguidance {}", start, *rules])


def _beside_text(style: ToolStyle, special: dict[str, int], rules: list[str]) -> str:
    """Return the start of an answer that is a text, calls, or a text and then calls.

    No text may contain the mark of a call in any spelling, because a reader would read the following text as a call.
    """
    if not style.begin:
        return f"start: WS? calls | /([{_SPACES}]*[^{_SPACES}\\{style.first}](.|\\n)*)?/ | /[{_SPACES}]+/"
    rules.append(f"FREE: {without(style.begin)}")
    if style.begin in special:
        return f"start: FREE? | FREE? {_marked(style.begin, special)} calls"
    rules.append(f"head[lazy]: TEXT {quote(style.begin)}")
    return "start: FREE? | head calls"


def _write_call(rule: str, tool: Tool, style: ToolStyle, special: dict[str, int], spelling: Spelling) -> list[str]:
    """Write the rules of one tool's calls. Raises SchemaFault."""
    parameters = object_of(tool.parameters)
    if tool.grammar is not None:
        return _write_custom_call(rule, tool, tool.grammar, style, special)
    if style.notation in ("json", "bare"):
        expression, rules = write_value(parameters, spelling, strict=tool.strict, prefix=rule)
        rules.append(f"arguments_{rule}: {expression}")
        if style.notation == "bare":
            return [*rules, f"{rule}: {quote(tool.name)} {_marked(style.middle, special)} WS? arguments_{rule} WS?"]
        key, name = quote(quote(style.arguments)), quote(quote(tool.name))
        call = (
            f'{rule}: WS? "{{" WS? "\\"name\\"" WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS? '
            f'arguments_{rule} WS? "}}" WS?'
        )
        return [*rules, call]
    writer = _arguments_writer(rule, parameters, tool, style, special, spelling)
    arguments = writer.arguments()
    begin, end = map(quote, writer.around(tool.name))
    return [*writer.finish(), f"{rule}: WS? {begin} WS? {arguments} WS? {end} WS?"]


def _write_custom_call(rule: str, tool: Tool, grammar: str, style: ToolStyle, special: dict[str, int]) -> list[str]:
    """Write the rules of a call whose only argument is a text with a grammar. Raises ValueError."""
    if style.notation not in ("json", "bare"):
        raise ValueError("a grammar of a tool's input cannot be enforced in the way that this model writes calls")
    start, rules = escape_grammar(grammar, f"{rule}_in")
    argument = quote(quote(next(iter(object_of(tool.parameters)["properties"]))))
    arguments = f'"{{" WS? {argument} WS? ":" WS? "\\"" {start} "\\"" WS? "}}"'
    if style.notation == "bare":
        return [*rules, f"{rule}: {quote(tool.name)} {_marked(style.middle, special)} WS? {arguments} WS?"]
    key, name = quote(quote(style.arguments)), quote(quote(tool.name))
    call = (
        f'{rule}: WS? "{{" WS? "\\"name\\"" WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS? {arguments} WS? "}}" WS?'
    )
    return [*rules, call]


def _arguments_writer(
    rule: str, parameters: dict[str, Any], tool: Tool, style: ToolStyle, special: dict[str, int], spelling: Spelling
) -> ArgumentsWriter:
    match style.notation:
        case "python":
            return PythonWriter(rule, parameters, spelling, strict=tool.strict)
        case "gemma":
            return GemmaWriter(rule, parameters, spelling, style.mark, special, strict=tool.strict)
        case _:
            return XmlWriter(rule, parameters, spelling, strict=tool.strict)


def _repeated(style: ToolStyle, special: dict[str, int]) -> str:
    return f" ({_marked(style.separator, special)} call)*"


def _text(text: str) -> str:
    return f"WS? {quote(text)}" if text else ""


def _marked(text: str, special: dict[str, int]) -> str:
    """Write a text whose markers may be special tokens; any white space is allowed around them."""
    parts = [text]
    for marker, token_id in special.items():
        parts = [
            piece
            for part in parts
            for piece in ([part] if part.startswith("<[") else part.replace(marker, f"\0<[{token_id}]>\0").split("\0"))
        ]
    return " ".join(f"WS? {part}" if part.startswith("<[") else _text(part.strip()) for part in parts if part.strip())
