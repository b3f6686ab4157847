"""The format of an answer: OpenAI's `response_format`, vLLM's `structured_outputs`, and its older `guided_*` fields."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from loramux.constraints import AnswerFormat, Choice, Grammar, JsonObject, JsonSchema, Regex
from loramux.gateway import AskedFormat, InvalidRequest

Choices = Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema with a name."""

    name: Annotated[str, Meta(max_length=512)]
    """Accepted and without effect."""
    schema: Any = None
    """A JSON schema; absent: any JSON object."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""
    description: str | None = None
    """Accepted and without effect."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's format of an answer."""

    type: str
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """Needed with the type `json_schema`."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's format of an answer: one of its fields."""

    json: Any = None
    """A JSON schema, or a text that holds one."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """Any JSON object."""


class FormattedBody(Protocol):
    """A body's fields that ask for a format."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: Choices | None
    guided_grammar: str | None


def asked_format(body: FormattedBody) -> AskedFormat | None:
    """Return the format that a body asks for. Raises InvalidRequest, where it asks for several too."""
    outputs = body.structured_outputs or StructuredOutputs()
    formats: dict[str, AnswerFormat | None] = {
        "response_format": _response_format(body.response_format),
        "structured_outputs.json": _schema(outputs.json),
        "structured_outputs.regex": None if outputs.regex is None else Regex(outputs.regex),
        "structured_outputs.choice": None if outputs.choice is None else Choice(outputs.choice),
        "structured_outputs.grammar": None if outputs.grammar is None else Grammar(outputs.grammar),
        "structured_outputs.json_object": JsonObject() if outputs.json_object else None,
        "guided_json": _schema(body.guided_json),
        "guided_regex": None if body.guided_regex is None else Regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else Choice(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else Grammar(body.guided_grammar),
    }
    asked = [AskedFormat(format, field) for field, format in formats.items() if format is not None]
    if len(asked) > 1:
        names = " and ".join(f"'{one.field}'" for one in asked)
        raise InvalidRequest(f"An answer has one format, and {names} ask for several; send one.", field=asked[1].field)
    return asked[0] if asked else None


def _response_format(asked: ResponseFormat | None) -> AnswerFormat | None:
    match asked:
        case None | ResponseFormat("text"):
            return None
        case ResponseFormat("json_object"):
            return JsonObject()
        case ResponseFormat("json_schema", None):
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.",
                field="response_format.json_schema",
                code="missing_required_parameter",
            )
        case ResponseFormat("json_schema", JsonSchemaFormat(schema=schema, strict=strict)):
            return _schema(schema, strict=bool(strict)) or JsonObject()
    raise InvalidRequest(
        f"Invalid value for 'response_format.type': '{asked.type[:40]}'. "
        "Supported are text, json_object and json_schema.",
        field="response_format.type",
        code="invalid_value",
    )


def _schema(schema: Any, *, strict: bool = True) -> JsonSchema | None:
    return None if schema is None else JsonSchema(schema, strict)
