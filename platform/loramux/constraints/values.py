"""Grammars of values: the JSON of a schema, and the base class of the notations that write values in another way.

A `ValueWriter` writes objects, lists and choices by its own rules, in Lark's notation. It writes literals as texts, so
that numbers keep their digits and texts may use any escape that JSON allows. `JsonWriter` passes all other parts to
llguidance's `%json`: patterns, formats, ranges of numbers, intersections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from loramux.constraints.schemas import (
    EXACT,
    OF_LISTS,
    OF_NUMBERS,
    OF_OBJECTS,
    OF_TEXTS,
    Path,
    References,
    Schema,
    SchemaFault,
    Sieve,
    is_of,
    json_fault,
    kinds,
    references_in,
)

WHITE_SPACE: dict[str, str] = {
    "bounded": r" |\r?\n[ \t]{0,2}",
    "free": r"[ \n\r\t]{1,40}",
}
"""White space between two tokens of JSON: one blank, or a line break and two blanks; or enough for any indentation."""

_ESCAPE = (
    r"\\([\"\\\/bfnrt]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
"""An escape of RFC 8259. A surrogate is always part of a pair."""
CHARACTER = rf"([^\"\\\x00-\x1F]|{_ESCAPE})"
SINGLE_QUOTED = rf"([^'\\\x00-\x1F]|\\'|{_ESCAPE})"
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
PLAIN_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
"""A key that the model chooses, in the notations that write keys without quotes."""
NOTHING = r"/[^\s\S]/"

MAX_ITEMS = 256
"""Largest bound of a list's length for which a rule is written here."""

_KEYWORDS: dict[str, frozenset[str]] = {
    "string": OF_TEXTS,
    "number": OF_NUMBERS,
    "integer": OF_NUMBERS,
    "array": OF_LISTS,
    "object": OF_OBJECTS,
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Keywords that constrain values of each type."""
_COMBINED = frozenset({"anyOf", "allOf", "$ref"})


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Facts of a model that its grammars depend on, in addition to the requested format."""

    white_space: str = "bounded"
    """White space between tokens of JSON: a key of `WHITE_SPACE`."""
    tokens: tuple[str, ...] = ()
    """Texts that the tokenizer reads as one token, and that a grammar therefore does not match as text."""

    def prelude(self) -> list[str]:
        """Return the terminals that all rules use."""
        return [
            f"B: /{WHITE_SPACE[self.white_space]}/",
            "WS: /[ \\n\\r\\t]{1,40}/",
            "TEXT: /(.|\\n)*/",
            f'STRING: /"{CHARACTER}*"/',
            f"SINGLE: /'{SINGLE_QUOTED}*'/",
            "INTEGER: /-?(0|[1-9][0-9]*)/",
            f"NUMBER: /{NUMBER}/",
            f"PLAIN_KEY: /{PLAIN_KEY}/",
        ]

    def breaks(self, text: str) -> bool:
        """Return whether a grammar cannot force `text`, because the tokenizer would cut it into other tokens."""
        return not self._beginnings.isdisjoint(text) and any(token in text for token in self.tokens)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """First characters of `tokens`: a vocabulary may have thousands of tokens, and most texts contain none of these
        characters.
        """
        return frozenset(token[0] for token in self.tokens)


DEFAULT = Spelling()


class Unwritable(ValueError):
    """A value that a notation cannot write."""


def quote(text: str) -> str:
    """Write a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_regex(text: str) -> str:
    """Write a text as a part of a regular expression of a Lark grammar."""
    return re.sub(r"[^\w ]", lambda match: f"\\u{{{ord(match[0]):x}}}", text, flags=re.ASCII)


def quoted(text: str, spelling: Spelling, mark: str = '"') -> str:
    """Return the terminal of a text in quotes. A character outside of ASCII may be written directly or escaped.

    If a token of the vocabulary begins at a character, that character gets two spellings, so that the grammar does not
    force it.
    """
    if text.isascii() and "\x7f" not in text and not spelling.breaks(text) and mark == '"':
        return quote(json.dumps(text))
    begins = {
        match.start() for token in spelling.tokens if token in text for match in re.finditer(re.escape(token), text)
    }
    parts = []
    for place, character in enumerate(text):
        escaped = as_regex(json.dumps(character)[1:-1])
        if character >= "\x7f":
            parts.append(f"({as_regex(character)}|{escaped})")
        elif place in begins:
            parts.append(f"({escaped}|\\\\u{ord(character):04x})")
        elif character in "'\"" and mark == "'":
            parts.append('"' if character == '"' else "\\\\'")
        else:
            parts.append(escaped)
    return f"/{as_regex(mark)}{''.join(parts)}{as_regex(mark)}/"


class ValueWriter:
    """Writes the grammar rules for the values of one schema."""

    words: ClassVar[Mapping[bool | None, str]] = {True: "true", False: "false", None: "null"}
    of_texts: ClassVar[frozenset[str]] = frozenset()
    """Keywords of texts that the notation can enforce."""

    def __init__(self, prefix: str, schema: Any, spelling: Spelling, *, strict: bool) -> None:
        """Sift the schema. Raises SchemaFault."""
        self.spelling = spelling
        self.strict = strict
        self._prefix = prefix
        sieve = Sieve(schema, strict=strict)
        self.root, self._definitions = sieve.sift(schema)
        self._places = sieve.places
        self._references = References({"$defs": self._definitions})
        self._rules: dict[str, str] = {}
        """Names of rules by their expression. A name has the suffix `[lazy]` if its rule ends as early as it can."""
        self._recursive: list[str] = []
        """Rules that may refer to themselves."""
        self._used: list[str] = []
        """Definitions that rules refer to, in the order of their first use."""

    def finish(self) -> list[str]:
        """Return the rules; called when all expressions are made. Raises SchemaFault."""
        for name in self._used:  # grows while a definition is written
            expression = self.value(self._definitions[name], self._places[name])
            self._recursive.append(f"{self._prefix}_d{name}: {expression}")
        return [*self._recursive, *(f"{rule}: {expression}" for expression, rule in self._rules.items())]

    def definition(self, reference: str) -> Schema:
        """Return the sifted definition that a sifted schema refers to."""
        return self._definitions[reference.rpartition("/")[2]]

    def percent_json(self, schema: dict[str, Any]) -> str:
        """Return the rule of a value whose grammar llguidance writes."""
        return self.rule(write_json(schema, self.spelling, strict=self.strict))

    def leave_out(self, path: Path, reason: str) -> None:
        """Leave a part out of the schema. Raises SchemaFault if the schema is strict."""
        if self.strict:
            raise SchemaFault(path, reason)

    def leave_all_out(self, keywords: Iterable[str], path: Path) -> None:
        """Leave out keywords that the notation cannot enforce. Raises SchemaFault if the schema is strict."""
        for keyword in sorted(keywords):
            self.leave_out((*path, keyword), f"'{keyword}' cannot be enforced in the way that this model writes calls")

    # ---- methods that notations override

    def key(self, name: str, *, is_top: bool) -> str:
        """Return the expression of a member's name and of the sign after it. Raises Unwritable."""
        raise NotImplementedError

    def free_key(self, names: Iterable[str], *, is_top: bool) -> str:
        """Return the expression of any name that is not in `names`, and of the sign after it."""
        raise NotImplementedError

    def text(self, schema: dict[str, Any]) -> str:
        """Return the expression of a text; `schema` has only keywords of `of_texts`."""
        raise NotImplementedError

    def literal_text(self, text: str) -> str:
        """Return the expression of one text. Raises Unwritable."""
        raise NotImplementedError

    def beyond(self, schema: dict[str, Any], others: frozenset[str], path: Path) -> str | None:  # noqa: ARG002
        """Return the expression of a schema with keywords that have no rules; None if these keywords are left out."""
        self.leave_all_out(others, path)
        return None

    def may_add(self, names: Iterable[str]) -> bool:
        """Return whether an object with these names may have other names, if its schema allows them."""
        return not any(True for _ in names)

    # ---- shared methods

    def value(self, schema: Schema, path: Path) -> str:
        """Return the expression of a value. Raises SchemaFault."""
        if isinstance(schema, bool):
            return self.anything() if schema else NOTHING
        types = schema.get("type")
        if "const" in schema or "enum" in schema:
            return self._without(schema, {"const", "enum", "type"}, path) or self._enumeration(schema, path)
        if types is None and schema.keys() & OF_OBJECTS and not isinstance(self, JsonWriter):
            types = "object"
        for keyword in ("$ref", "anyOf", "allOf"):
            if keyword in schema and (types is None or self._are_of(schema, keyword, types)):
                others = self._without(schema, {keyword, "type"}, path)
                return others or self._combined(keyword, schema[keyword], path)
        if types is None:
            return (self._without(schema, set(), path) if schema else None) or self.anything()
        if isinstance(types, list):
            single = [kind for kind in types if not (kind == "integer" and "number" in types)]
            return self._alternatives([self.value({**schema, "type": kind}, path) for kind in single])
        return self._of_type(types, schema, path)

    def anything(self) -> str:
        """Return the rule of any value."""
        name = f"{self._prefix}_any"
        if not any(rule.startswith(f"{name}:") for rule in self._recursive):
            self._recursive.append("")
            place = len(self._recursive) - 1
            words = " | ".join(map(quote, self.words.values()))
            several = f'"[" B? ({name} (B? "," B? {name})*)? B? "]"'
            member = f"{self.free_key((), is_top=False)} B? {name}"
            members = f'"{{" B? ({member} (B? "," B? {member})*)? B? "}}"'
            self._recursive[place] = f"{name}: {self.text({})} | NUMBER | {words} | {several} | {members}"
        return name

    def members(self, schema: dict[str, Any], path: Path, *, is_top: bool = False) -> str:
        """Return the members of an object, in the schema's order, with commas between them. Raises SchemaFault."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        found: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            here = (*path, "properties", name) if name in properties else (*path, "required")
            if (of_name := properties.get(name, others)) is False:
                if name in required:
                    self.leave_out(here, f"'{name[:80]}' is required, and not allowed")
                continue
            try:
                key = self.key(name, is_top=is_top)
            except Unwritable as error:
                if self.strict or name in required:
                    raise SchemaFault(here, str(error)) from None
                continue
            found.append((f"{key} B? {self.value(of_name, here)}", name in required))
        extra = None
        if others is not False and self.may_add(properties):
            key = self.free_key(properties, is_top=is_top)
            extra = f"{key} B? {self.value(others, (*path, 'additionalProperties'))}"
        return self._separated(found, extra)

    def rule(self, expression: str) -> str:
        """Return the name of the rule of an expression."""
        return self._rules.setdefault(expression, f"{self._prefix}_r{len(self._rules)}")

    def terminal(self, expression: str) -> str:
        """Return the name of the terminal of an expression."""
        return self._rules.setdefault(expression, f"{self._prefix.upper()}_R{len(self._rules)}")

    def lazy(self, expression: str) -> str:
        """Return the name of the terminal of an expression that ends as early as it can."""
        name = self._rules.setdefault(expression, f"{self._prefix}_r{len(self._rules)}[lazy]")
        return name.removesuffix("[lazy]")

    def enumeration(self, values: list[Any], path: Path) -> str:
        """Return the expression of one of `values`, limited to those that the notation can write. Raises
        SchemaFault.
        """
        written, reason = [], "no value is left"
        for value in values:
            try:
                written.append(self.literal(value))
            except Unwritable as error:
                reason = str(error)
                self.leave_out(path, reason)
        if not written:
            raise SchemaFault(path, reason)
        texts = [one for one in written if _is_terminal(one)]
        others = [one for one in written if not _is_terminal(one)]
        return self._alternatives([*([self.terminal(" | ".join(texts))] if texts else []), *others])

    def literal(self, value: Any) -> str:
        """Return the expression of one value. Raises Unwritable."""
        match value:
            case None | bool():
                return quote(self.words[value])
            case int() | float():
                return quote(json.dumps(value))
            case str():
                return self.literal_text(value)
            case list():
                items = ' B? "," B? '.join(map(self.literal, value))
                return f'"[" B? {items} B? "]"'
            case _:
                members = [f"{self.key(name, is_top=False)} B? {self.literal(one)}" for name, one in value.items()]
                return '"{" B? ' + ' B? "," B? '.join(members) + ' B? "}"'

    def _are_of(self, schema: dict[str, Any], keyword: str, types: Any) -> bool:
        """Return whether a combination only restricts values to `types`, and thus has the same meaning as `types`."""
        names = {"number" if kind == "integer" else kind for kind in (types if isinstance(types, list) else [types])}
        return "integer" not in types and kinds({keyword: schema[keyword]}, self._references) <= names

    def _without(self, schema: dict[str, Any], known: set[str], path: Path) -> str | None:
        others = frozenset(schema.keys() - known)
        return self.beyond(schema, others, path) if others else None

    def _enumeration(self, schema: dict[str, Any], path: Path) -> str:
        keyword = "enum" if "enum" in schema else "const"
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        if keyword == "enum" and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        if "type" in schema:
            values = [value for value in values if is_of(value, schema["type"])]
        if not values:
            self.leave_out((*path, keyword), "no value of it has the schema's type")
            return self.value({"type": schema["type"]} if "type" in schema else True, path)
        return self.enumeration(values, (*path, keyword))

    def _combined(self, keyword: str, value: Any, path: Path) -> str:
        here = (*path, keyword)
        if keyword == "$ref":
            name = value.rpartition("/")[2]
            if name not in self._used:
                self._used.append(name)
            return f"{self._prefix}_d{name}"
        if keyword == "anyOf":
            return self._alternatives([self.value(one, (*here, str(i))) for i, one in enumerate(value)])
        if len(value) == 1:
            return self.value(value[0], (*here, "0"))
        return self.beyond({keyword: value}, frozenset({keyword}), path) or self.anything()

    def _of_type(self, kind: str, schema: dict[str, Any], path: Path) -> str:
        says = {name: schema[name] for name in schema if name in _KEYWORDS[kind] | _COMBINED}
        if others := frozenset(says.keys() - self._known(kind, says)):
            if (whole := self.beyond({"type": kind, **says}, others, path)) is not None:
                return whole
            says = {name: says[name] for name in says if name not in others}
        match kind:
            case "string":
                return self.text(says)
            case "integer" | "number":
                return self.percent_json({"type": kind, **says}) if says else kind.upper()
            case "array":
                return self._list(says, path)
            case "object":
                return f'"{{" B? {self.members(says, path)} B? "}}"'
            case _:
                words = (True, False) if kind == "boolean" else (None,)
                return self._alternatives([quote(self.words[word]) for word in words])

    def _known(self, kind: str, says: dict[str, Any]) -> Set[str]:
        """Return the keywords of a type that have rules here."""
        if kind != "array":
            objects = {"properties", "required", "additionalProperties"}
            return {"string": self.of_texts, "object": objects}.get(kind, OF_NUMBERS)
        known = {keyword for keyword in ("minItems", "maxItems") if says.get(keyword, 0) <= MAX_ITEMS}
        return known if isinstance(says.get("items"), list) else known | {"items"}

    def _list(self, schema: dict[str, Any], path: Path) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0 or schema.get("items") is False:
            return '"[" B? "]"'
        items = item = self.rule(self.value(schema.get("items", True), (*path, "items")))
        if most != 1:  # Lark has no {0,0}
            items += f' (B? "," B? {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" B? {items if least else f"({items})?"} B? "]"'

    def _alternatives(self, expressions: list[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})" if expressions else NOTHING

    def _separated(self, members: list[tuple[str, bool]], extra: str | None) -> str:
        """Return the members in order, separated: all required ones, any of the optional ones, then any number of
        `extra`.
        """
        rest, first = '""', '""'
        if extra is not None:
            extra = self.rule(extra)
            rest = self.rule(f'(B? "," B? {extra})*')
            first = self.rule(f"({extra} {rest})?")
        for expression, is_required in reversed(members):
            name = self.rule(expression)
            after, begins = f'B? "," B? {name}', f"{name} {rest}"
            first = self.rule(begins if is_required else f"{begins} | {first}")
            rest = self.rule(f"{after} {rest}" if is_required else f"({after})? {rest}")
        return first


def _is_terminal(expression: str) -> bool:
    """Return whether an expression is one literal or one regular expression."""
    if expression.startswith("/"):
        return True
    try:
        return isinstance(json.loads(expression), str)
    except ValueError:
        return False


class JsonWriter(ValueWriter):
    """Writes values as JSON."""

    of_texts = frozenset({"minLength", "maxLength"})

    def key(self, name: str, *, is_top: bool) -> str:  # noqa: ARG002
        """Return `"name":`."""
        return f'{quoted(name, self.spelling)} B? ":"'

    def free_key(self, names: Iterable[str], *, is_top: bool) -> str:  # noqa: ARG002
        """Return any other text and `:`."""
        taken = " | ".join(quoted(name, self.spelling) for name in names)
        return f'{self.terminal(f"STRING & ~({taken})") if taken else "STRING"} B? ":"'

    def text(self, schema: dict[str, Any]) -> str:
        """Return a text in quotes."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return self.terminal(f'/"{CHARACTER}{{{least},{most}}}"/') if schema else "STRING"

    def literal_text(self, text: str) -> str:
        """Return one text in quotes."""
        return quoted(text, self.spelling)

    def may_add(self, names: Iterable[str]) -> bool:  # noqa: ARG002
        """Return True: any object may have other names."""
        return True

    def beyond(self, schema: dict[str, Any], others: frozenset[str], path: Path) -> str | None:  # noqa: ARG002
        """Return the schema in llguidance's form, without parts that llguidance cannot enforce. Raises SchemaFault."""
        kept = self._held(dict(sorted(schema.items(), key=lambda item: item[0] != "type")), path)
        definitions = self._reached(kept)
        if (reason := json_fault({**kept, "$defs": definitions})) is not None:
            self.leave_out(path, reason)
            whole, kept = kept, {}
            for keyword in whole:
                if json_fault({**kept, keyword: whole[keyword], "$defs": definitions}) is None:
                    kept[keyword] = whole[keyword]
        return self.percent_json({**kept, "$defs": definitions})

    def _reached(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the definitions that a schema reaches through references."""
        found: dict[str, Any] = {}
        pending = [*references_in(schema)]
        while pending:
            if (name := pending.pop()) not in found and name in self._definitions:
                found[name] = self._held(self._definitions[name], self._places[name])
                pending += references_in(found[name])
        return found

    def _held(self, schema: Any, path: Path) -> Any:
        """Return a schema without the values that llguidance would change."""
        if not isinstance(schema, dict):
            return schema
        held: dict[str, Any] = {}
        for keyword, part in schema.items():
            here = (*path, keyword)
            if keyword in ("const", "enum") and self._is_changed(part):
                self.leave_out(here, "holds a number beyond 2^53, or the text of a token, next to other keywords")
            elif keyword in ("const", "enum"):
                held[keyword] = part
            elif keyword in ("properties", "patternProperties"):
                held[keyword] = {name: self._held(one, (*here, name)) for name, one in part.items()}
            elif isinstance(part, list):
                held[keyword] = [self._held(one, (*here, str(place))) for place, one in enumerate(part)]
            else:
                held[keyword] = self._held(part, here)
        return held

    def _is_changed(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(self._is_changed, [*value, *value.values()]))
        if isinstance(value, list):
            return any(map(self._is_changed, value))
        if isinstance(value, str):
            return self.spelling.breaks(value)
        return isinstance(value, int) and abs(value) > EXACT


def write_json(schema: dict[str, Any], spelling: Spelling, *, strict: bool) -> str:
    """Write the part of a Lark grammar in which llguidance reads a schema itself."""
    options = {"whitespace_pattern": f"({WHITE_SPACE[spelling.white_space]})?", "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def write_value(schema: Schema, spelling: Spelling, *, strict: bool, prefix: str = "answer") -> tuple[str, list[str]]:
    """Return the expression of a schema's values as JSON, and its rules. Raises SchemaFault."""
    writer = JsonWriter(prefix, schema, spelling, strict=strict)
    expression = writer.value(writer.root, ())
    return expression, writer.finish()
