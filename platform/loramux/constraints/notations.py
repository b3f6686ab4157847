"""Notations other than JSON in which models write the arguments of a call: each notation has one description, which
both grammars and readers use.

    python    city="Paris", days=3, where={"lat": 1.5}, exact=True
    gemma     city:<|"|>Paris<|"|>,days:3,where:{lat:1.5},exact:true
    xml       <parameter=city>\\nParis\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>

A writer makes the grammar of a tool's arguments. `serving.calls` uses the same description to read the model's output:

- the signs of `LiteralNotation`;
- the names that are no plain keys (`special_names`), which a reader can find only if it knows them;
- the types of an XML argument (`argument_kinds`), which show if its content is a text, JSON, or either of the two.

A value that a notation cannot write is refused: for example, a text that contains the notation's own mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from loramux.constraints.schemas import (
    MAX_DEPTH,
    OF_NUMBERS,
    OF_TEXTS,
    Path,
    References,
    Schema,
    SchemaFault,
    has_shape,
    kind_of,
    kinds,
)
from loramux.constraints.values import (
    CHARACTER,
    NUMBER,
    PLAIN_KEY,
    JsonWriter,
    Spelling,
    Unwritable,
    ValueWriter,
    as_regex,
    quote,
    quoted,
)

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
"""Texts before the name of a call and after its arguments, in XML."""

MARKED = "'{}' has a mark of calls in it, and cannot be written in the way that this model writes calls"
UNNAMED = "the name '{}' cannot be written in the way that this model writes calls"

_PLAIN = re.compile(PLAIN_KEY)


class LiteralNotation(msgspec.Struct, frozen=True, kw_only=True):
    """The signs of arguments that are written as names and literals."""

    before_name: str = ""
    opening: str
    closing: str
    sign: str
    """Sign after an argument's name."""
    quotes: str
    """Characters that may enclose a text with JSON's escapes."""
    nested_names: bool
    """Write the names within an object like those of arguments. Otherwise they are written as texts."""
    words: dict[str, bool | None]

    def is_ambiguous(self, name: str) -> bool:
        """Return whether a reader may take the beginning of a name as a whole name, a text or a blank."""
        begins = rf"{re.escape(self.sign)}\s*[\"'\[{{(<0-9TFNtfn-]"
        return name[:1].isspace() or name[:1] in ("'", '"') or re.search(begins, name) is not None


PYTHON = LiteralNotation(
    opening="(",
    closing=")",
    sign="=",
    quotes="\"'",
    nested_names=False,
    words={"True": True, "False": False, "None": None},
)
GEMMA = LiteralNotation(
    before_name="call:",
    opening="{",
    closing="}",
    sign=":",
    quotes='"',
    nested_names=True,
    words={"true": True, "false": False, "null": None},
)


def is_plain(name: str) -> bool:
    """Return whether a name consists of letters, digits and underscores only, so that its end is clear."""
    return _PLAIN.fullmatch(name) is not None


def special_names(schema: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the names of a schema's properties, at any level, that are not plain keys."""
    if isinstance(schema, dict) and depth:
        for keyword, part in schema.items():
            if keyword in ("properties", "const", "enum", "required"):
                yield from (name for name in _names(part, depth) if not is_plain(name))
            yield from special_names(part, depth - 1)
    elif isinstance(schema, list) and depth:
        for part in schema:
            yield from special_names(part, depth - 1)


def _names(part: Any, depth: int) -> Iterator[str]:
    if isinstance(part, dict):
        yield from part
        if depth:
            for inner in part.values():
                yield from _names(inner, depth - 1)
    elif isinstance(part, list):
        for inner in part:
            if isinstance(inner, str):
                yield inner
            elif depth:
                yield from _names(inner, depth - 1)


def object_of(parameters: Any) -> dict[str, Any]:
    """Return the schema of a call's arguments. They are an object, even if the schema says otherwise."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**(parameters if isinstance(parameters, dict) else {}), "type": "object"}


def argument_kinds(parameters: Any, name: str) -> frozenset[str]:
    """Return the JSON types that an argument may have according to its schema."""
    root, references = object_of(parameters), References(object_of(parameters))
    for _ in range(MAX_DEPTH):
        properties = root.get("properties")
        if has_shape("properties", properties) or "$ref" not in root:
            break
        found = references.find(root["$ref"])
        root = found if isinstance(found, dict) else {}
    return kinds(properties.get(name, True) if isinstance(properties, dict) else True, references)


class ArgumentsWriter(ValueWriter):
    """Writes the grammar of a call's arguments, without the texts around them."""

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of the tool `name`."""
        raise NotImplementedError

    def arguments(self) -> str:
        """Return the expression of all arguments. Raises SchemaFault."""
        schema, path = self._top()
        return self.members(schema, path, is_top=True)

    def _top(self) -> tuple[dict[str, Any], Path]:
        """Return the object of the arguments and its path. If the schema is only a reference, return the object that it
        names.
        """
        schema, path = self.root, Path()
        for _ in range(MAX_DEPTH):
            assert isinstance(schema, dict), "arguments are an object"
            if "properties" in schema or "$ref" not in schema:
                break
            path = (*path, "$ref")
            found = self.definition(schema["$ref"])
            schema = found if isinstance(found, dict) else {}
        assert isinstance(schema, dict), "arguments are an object"
        known = {"type", "properties", "required", "additionalProperties", "$ref"}
        self.leave_all_out(schema.keys() - known, path)
        return schema, path


class LiteralWriter(ArgumentsWriter):
    """Arguments as names and literals."""

    notation: ClassVar[LiteralNotation]

    def around(self, name: str) -> tuple[str, str]:
        """Return the text that opens the arguments, with the name, and the text that closes them."""
        return f"{self.notation.before_name}{name}{self.notation.opening}", self.notation.closing

    def key(self, name: str, *, is_top: bool) -> str:
        """Return a name and the sign after it. Raises Unwritable."""
        if not (is_top or self.notation.nested_names):
            return f'{self.literal_text(name)} B? ":"'
        if (not is_plain(name) and self.notation.is_ambiguous(name)) or self.spelling.breaks(name):
            raise Unwritable(UNNAMED.format(name[:80]))
        return quote(name + self.notation.sign)

    def free_key(self, names: Iterable[str], *, is_top: bool) -> str:  # noqa: ARG002
        """Return a plain name, or a text."""
        if is_top:
            return f"PLAIN_KEY {quote(self.notation.sign)}"
        key = f"(PLAIN_KEY | {self.text({})})" if self.notation.nested_names else self.text({})
        return f'{key} B? ":"'


class PythonWriter(LiteralWriter):
    """Keyword arguments of a Python call; texts in either quotes."""

    notation = PYTHON
    words = {value: word for word, value in PYTHON.words.items()}  # noqa: RUF012
    of_texts = OF_TEXTS

    def text(self, schema: dict[str, Any]) -> str:
        """Return a text in double quotes, or in single quotes if the schema does not restrict it further."""
        if not schema:
            return "(STRING | SINGLE)"
        if schema.keys() <= {"minLength", "maxLength"}:
            return self.terminal(f'/"{CHARACTER}{{{schema.get("minLength", 0)},{schema.get("maxLength", "")}}}"/')
        return self.percent_json({"type": "string", **schema})

    def literal_text(self, text: str) -> str:
        """Return a text in either quotes."""
        return self.terminal(f"{quoted(text, self.spelling)} | {quoted(text, self.spelling, mark=chr(39))}")


class GemmaWriter(LiteralWriter):
    """Members without quotes around their names; texts between two marks."""

    notation = GEMMA

    def __init__(
        self, prefix: str, schema: Any, spelling: Spelling, mark: str, special: Mapping[str, int], *, strict: bool
    ) -> None:
        super().__init__(prefix, schema, spelling, strict=strict)
        self._mark_text = mark
        self._is_token = mark in special
        self._mark = f"<[{special[mark]}]>" if mark in special else quote(mark)

    def text(self, schema: dict[str, Any]) -> str:  # noqa: ARG002
        """Return a text between marks."""
        if self._is_token:
            return f"{self._mark} {self.terminal(without(self._mark_text))} {self._mark}"
        return f"{self._mark} {self.lazy(f'TEXT {self._mark}')}"

    def literal_text(self, text: str) -> str:
        """Return one text between marks. Raises Unwritable."""
        if self._mark_text in text or self.spelling.breaks(text):
            raise Unwritable(MARKED.format(text[:80]))
        return f"{self._mark} {quote(text)} {self._mark}" if text else f"{self._mark} {self._mark}"


def without(mark: str) -> str:
    """Return the terminal of any text without `mark` in it."""
    return f"/(.|\\n)*/ & ~/(.|\\n)*{as_regex(mark)}(.|\\n)*/"


class XmlWriter(JsonWriter, ArgumentsWriter):
    """Writes an element for each argument. A text is written unchanged, any other value as JSON.

    If an argument's schema allows a text and another type, a text is still written without quotes. But if a reader
    would take this text for a value of the other type, it is written in quotes, as JSON.
    """

    BEGIN = "<parameter="
    AFTER_NAME = ">\n"
    END = "\n</parameter>"

    def __init__(self, prefix: str, schema: Any, spelling: Spelling, *, strict: bool) -> None:
        super().__init__(prefix, schema, spelling, strict=strict)
        self._asked = schema

    def around(self, name: str) -> tuple[str, str]:
        """Return the tags of the function."""
        return f"{FUNCTION}{name}>", END_OF_FUNCTION

    def arguments(self) -> str:
        """Return the elements in the order of the schema. Raises SchemaFault."""
        schema, path = self._top()
        required, elements = schema.get("required", []), []
        others = schema.get("additionalProperties", True)
        properties: dict[str, Schema] = {name: others for name in required} | schema.get("properties", {})
        for name, one in {name: properties[name] for name in (*schema.get("properties", {}), *required)}.items():
            here = (*path, "properties", name)
            if self.AFTER_NAME in name or self.spelling.breaks(name):
                if self.strict or name in required:
                    raise SchemaFault(here, UNNAMED.format(name[:80]))
                continue
            element = self._element(quote(f"{self.BEGIN}{name}{self.AFTER_NAME}"), name, one, here)
            rule = self.rule(element)
            elements.append(rule if name in required else f"{rule}?")
        if not properties and others is not False:
            begin = f"{quote(self.BEGIN)} PLAIN_KEY {quote(self.AFTER_NAME)}"
            elements.append(f"({self._element(begin, '', others, (*path, 'additionalProperties'))})*")
        return " ".join(elements)

    def _element(self, begin: str, name: str, schema: Schema, path: Path) -> str:
        return f"{begin} {self._content(schema, argument_kinds(self._asked, name), path)} WS?"

    def _content(self, schema: Schema, found: frozenset[str], path: Path) -> str:
        """Return the expression of an argument's content and its end."""
        if "string" not in found:
            return f"{self.value(schema, path)} {quote(self.END)}"
        raw, scalars, structures = self._sorted(schema, found, path)
        end = quote(self.END)
        alternatives = list(dict.fromkeys(structures))
        contents = [f"({' | '.join(alternatives)}) {end}"] if alternatives else []
        if scalars:
            contents.append(self.lazy(f"({' | '.join(dict.fromkeys(scalars))}) {end}"))
        if raw:
            contents.append(self.lazy(f"{self.terminal(_raw(found))} {end}"))
        return f"({' | '.join(contents)})"

    def _sorted(self, schema: Schema, found: frozenset[str], path: Path) -> tuple[bool, list[str], list[str]]:
        """Return whether any text is allowed, the terminals of other scalars and of texts, and lists and objects."""
        raw, scalars, structures = False, list[str](), list[str]()
        is_text = found == {"string"}
        for one, here in self._branches(schema, path):
            says = one if isinstance(one, dict) else {}
            if "enum" in says:
                scalars += self._enumerated(says["enum"], found, here)
                structures += [self.literal(value) for value in says["enum"] if isinstance(value, dict | list)]
                continue
            kind = says.get("type")
            beside = OF_NUMBERS | OF_TEXTS | {"anyOf", "allOf", "$ref"}
            for keyword in sorted(says.keys() & beside if kind not in ("array", "object") else ()):
                self.leave_out(
                    (*here, keyword), f"'{keyword}' cannot be enforced in the way that this model writes calls"
                )
            allowed = found if kind is None else {"number" if kind == "integer" else str(kind)} & found
            raw |= "string" in allowed
            scalars += ["STRING"] if "string" in allowed and not is_text else []
            scalars += ["INTEGER" if kind == "integer" else "NUMBER"] if "number" in allowed else []
            scalars += ['"true"', '"false"'] if "boolean" in allowed else []
            scalars += ['"null"'] if "null" in allowed else []
            for structure in sorted({"array", "object"} & allowed):
                structures.append(self.value({**says, "type": structure}, here))
        return raw, scalars, structures

    def _enumerated(self, values: list[Any], found: frozenset[str], path: Path) -> list[str]:
        """Return the terminals of an enumeration's scalars. Raises SchemaFault."""
        written, reason = [], ""
        for value in values:
            if isinstance(value, dict | list) or kind_of(value) not in found:
                continue
            if not isinstance(value, str):
                written.append(self.literal(value))
            elif found != {"string"} and re.fullmatch(_read_as_json(found), value):
                written.append(quoted(value, self.spelling))
            elif self.END in value + self.END[:-1] or self.spelling.breaks(value):
                reason = MARKED.format(value[:80])
                self.leave_out(path, reason)
            else:
                written.append(quote(value) if value else '""')
        if not written and reason:
            raise SchemaFault(path, reason)
        return written

    def _branches(
        self, schema: Schema, path: Path, seen: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Schema, Path]]:
        """Yield the alternatives of a schema. Each has one type or an enumeration, or has neither."""
        if isinstance(schema, bool):
            yield schema, path
        elif "const" in schema or "enum" in schema:
            yield {"enum": schema.get("enum", [schema.get("const")])}, path
        elif (reference := schema.get("$ref")) is not None and reference not in seen:
            yield from self._branches(self.definition(reference), (*path, "$ref"), seen | {reference})
        elif "anyOf" in schema:
            for place, one in enumerate(schema["anyOf"]):
                yield from self._branches(one, (*path, "anyOf", str(place)), seen)
        elif len(schema.get("allOf", ())) == 1:
            yield from self._branches(schema["allOf"][0], (*path, "allOf", "0"), seen)
        elif isinstance(schema.get("type"), list):
            for kind in schema["type"]:
                yield {**schema, "type": kind}, path
        else:
            yield schema, path


_BLANKS = r"[ \t\r\n]*"


def _read_as_json(found: frozenset[str]) -> str:
    """Return the expression of the texts that a reader takes for JSON if an argument may have these types."""
    scalars = {"null": "null", "boolean": "true|false", "number": NUMBER}
    structures = {"string": r"\"", "array": r"\[", "object": r"\{"}
    one = "|".join(scalars[kind] for kind in sorted(found & scalars.keys()))
    first = "|".join(structures[kind] for kind in sorted(found & structures.keys()))
    return rf"{_BLANKS}(({first})(.|\n)*" + (rf"|({one}){_BLANKS})" if one else ")")


def _raw(found: frozenset[str]) -> str:
    """Return the terminal of a text that is written without quotes or escapes."""
    return "TEXT" if found == {"string"} else f"/(.|\\n)*/ & ~/{_read_as_json(found)}/"
