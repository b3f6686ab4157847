"""Formats that a request may ask for, and their grammars."""

from __future__ import annotations

from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from loramux.constraints.values import DEFAULT, Spelling, quote, write_value

GrammarText = str
"""A grammar, in llguidance's own JSON."""


class JsonObject(msgspec.Struct, frozen=True, tag=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, tag=True):
    """JSON that a schema allows."""

    schema: Any
    """The schema, or a text that holds it as JSON."""
    strict: bool = True
    """True: refuse keywords that cannot be enforced. False: leave them out."""


class Regex(msgspec.Struct, frozen=True, tag=True):
    """A text that the whole expression matches."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag=True):
    """A format: one of several texts."""

    texts: list[str]


class Grammar(msgspec.Struct, frozen=True, tag=True):
    """A context-free grammar, in the notation of Lark or GBNF."""

    text: str


AnswerFormat = JsonObject | JsonSchema | Regex | Choice | Grammar


def write_format(asked: AnswerFormat, spelling: Spelling = DEFAULT) -> GrammarText:
    """Write the grammar of a format. Raises ValueError with a readable sentence if that is not possible."""
    match asked:
        case JsonObject() | JsonSchema():
            expression, rules = write_content(asked, spelling)
            return to_grammar("\n".join(["%llguidance {}", f"start: {expression}", *spelling.prelude(), *rules]))
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Choice(texts):
            for text in texts:
                if spelling.breaks(text):
                    raise ValueError(f"the choice '{text[:80]}' has the text of a token of this model in it")
            return to_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(quote, texts)))
        case Grammar(text):
            try:
                return to_grammar(any_to_lark(text))
            except Exception as error:
                raise ValueError(f"the grammar cannot be read: {str(error)[:200]}") from None


def write_content(asked: JsonObject | JsonSchema, spelling: Spelling = DEFAULT) -> tuple[str, list[str]]:
    """Return the expression of the format as JSON, and its rules. Raises ValueError."""
    if isinstance(asked, JsonObject):
        return write_value({"type": "object"}, spelling, strict=True)
    return write_value(read_schema(asked.schema), spelling, strict=asked.strict)


def read_schema(schema: Any) -> dict[str, Any] | bool:
    """Return a schema; a text that holds a schema is decoded. Raises ValueError."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the schema is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object")
    return schema


def to_grammar(text: str) -> GrammarText:
    """Return a Lark grammar in the form that llguidance reads."""
    return LLMatcher.grammar_from_lark(text)
