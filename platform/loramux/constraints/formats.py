"""The formats that a request may ask for, and their grammars."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the tokens of JSON: enough for indentation, and no endless run of blanks."""

GrammarText = str
"""A grammar in llguidance's own JSON."""


class JsonObject(msgspec.Struct, frozen=True, tag=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """JSON that a schema allows."""

    schema: Any
    """The schema, or a text that holds it."""
    strict: bool = True
    """Refuse keywords that cannot be enforced, instead of leaving them out."""


class Regex(msgspec.Struct, frozen=True, tag=True):
    """A text that the whole expression matches."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag=True):
    """One of some texts."""

    texts: list[str]


class Grammar(msgspec.Struct, frozen=True, tag=True):
    """A context-free grammar, in Lark's or in GBNF's notation."""

    text: str


AnswerFormat = JsonObject | JsonSchema | Regex | Choice | Grammar


def write_format(asked: AnswerFormat) -> GrammarText:
    """Write the grammar of a format. Raises ValueError with a sentence where that is not possible."""
    match asked:
        case JsonObject() | JsonSchema():
            return to_grammar(f"start: {write_content(asked)}")
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Choice(texts):
            return to_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(quote, texts)))
        case Grammar(text):
            try:
                return to_grammar(any_to_lark(text))
            except Exception as error:
                raise ValueError(f"the grammar cannot be read: {str(error)[:200]}") from None


def write_content(asked: JsonObject | JsonSchema) -> str:
    """Write the part of a Lark grammar that stands for the format. Raises ValueError."""
    if isinstance(asked, JsonObject):
        return write_json({"type": "object"}, strict=True)
    return write_json(read_schema(asked.schema), strict=asked.strict)


def read_schema(schema: Any) -> dict[str, Any] | bool:
    """Return a schema, decoded where it is a text that holds one. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the schema is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object")
    return schema


def write_json(schema: dict[str, Any] | bool, *, strict: bool) -> str:
    """Write the part of a Lark grammar that stands for JSON of `schema`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def quote(text: str) -> str:
    """Write a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def to_grammar(text: str) -> GrammarText:
    """Return a Lark grammar as llguidance reads it."""
    return LLMatcher.grammar_from_lark(text)
