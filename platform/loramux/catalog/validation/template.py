"""The process that renders chat templates: `prepare` for the fork server. This process is small, because it imports
only jinja2.

A template is a customer's code. Each rendering has a separate process, with the kernel's limits on time and memory. A
template that never ends, or takes all memory, ends with its process and cannot affect the next rendering. The
environment is that of transformers (`transformers.utils.chat_template_utils`), so a template renders as in training.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from loramux.catalog.validation.jobs import Fault, RenderedText, RenderJob


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. The fork server calls `prepare` once."""
    del setup
    environment = template_environment()
    return lambda job: msgspec.json.encode(render(msgspec.json.decode(job, type=RenderJob), environment))


def render(job: RenderJob, environment: ImmutableSandboxedEnvironment) -> RenderedText:
    """Render one conversation. A refusal is part of the result."""
    try:
        pieces, length = [], 0
        for piece in environment.from_string(job.template).generate(**job.variables):
            length += len(piece)
            if length > job.max_characters:
                return RenderedText(fault="too_long", reason=f"it renders more than {job.max_characters} characters")
            pieces.append(piece)
        return RenderedText(text="".join(pieces))
    except Exception as error:  # a template may use our values in any way, so any error may occur
        line = (str(error).splitlines() or [""])[0][:300]
        at = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        name = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return RenderedText(fault=_fault_of(error), reason=f"{at}{name}{line}")


def _fault_of(error: Exception) -> Fault:
    match error:
        case MemoryError() | RecursionError():
            return "too_expensive"
        case SecurityError() | jinja2.TemplateNotFound():
            return "forbidden"
        case jinja2.TemplateSyntaxError():
            return "invalid"
        case TypeError() if "no loader" in str(error):  # jinja's answer to include, import and extends
            return "forbidden"
        case _:
            return "refused"


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers renders chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens in training; here its content is normal text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateDict:
    """Makes dicts, but is not a dict, so that a template cannot reach the attributes of the class itself."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return a dict with these keys and one value."""
        return dict.fromkeys(*arguments)


class _TemplateNamespace(Namespace):
    """A namespace that stores no name that begins with an underscore."""

    def __init__(*args: Any, **items: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **items)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace stores no name that begins with an underscore, such as {name[:40]!r}")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
