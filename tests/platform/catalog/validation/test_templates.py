"""Customers' chat templates: rendered as transformers does, and ended by their limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tiny_base import CHAT_TEMPLATE, byte_tokenizer

from loramux.catalog.validation.rendering import (
    TRIALS,
    TemplateFailed,
    TemplateRenderer,
    template_variables,
    try_template,
)

MESSAGES = [
    {"role": "system", "content": "Be <terse> & 'kind'."},
    {"role": "user", "content": "{{ 7 * 7 }} naïve"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "é"]}}}]},
]

TEMPLATES = {
    "base": CHAT_TEMPLATE,
    "chatml": (
        "{%- for m in messages -%}\n    {{- '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ {'a': 1, 'é': '<'} | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "blocks": "{% if true %}\n  a\n{% endif %}\n  b{{ bos_token }}{{ undefined_name }}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "dict": "{{ dict(a=1).items() | list }}{{ dict.fromkeys(['x'], 1) }}",
    "filters": "{{ messages | map(attribute='role') | join(',') | upper }}{{ messages[0].content.split(' ')[0] }}",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as renderer:
        yield renderer


def render(renderer: TemplateRenderer, template: str, **more: Any) -> str:
    variables = template_variables({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, MESSAGES, **more)
    return renderer.render(template, variables, 100_000)


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_in_transformers(renderer: TemplateRenderer, name: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    wanted = tokenizer.apply_chat_template(json.loads(json.dumps(MESSAGES)), tokenize=False, add_generation_prompt=True)
    assert render(renderer, TEMPLATES[name]) == wanted


HOSTILE = {
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too_expensive"),
    "wide": ("{{ 'a' * 100000000 }}", "too_expensive"),
    "long": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "too_long"),
    "doubling": (
        "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "too_expensive",
    ),
    "power": ("{{ (9 ** 9999999) | string | length }}", "too_expensive"),
    "attribute walk": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "forbidden"),
    "globals": ("{{ raise_exception.__globals__ }}", None),
    "attr filter": ("{{ (messages | attr('__class__')).__mro__ }}", "forbidden"),
    "format walk": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "forbidden"),
    "change": ("{{ messages.append(1) }}", "forbidden"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "too_expensive"),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "too_expensive"),
    "include": ("{% include '/etc/passwd' %}", "forbidden"),
    "import": ("{% import 'os' as os %}", "forbidden"),
    "extends": ("{% extends 'x' %}", "forbidden"),
    "syntax": ("{% if %}", "invalid"),
    "lipsum": ("{{ lipsum(n=100000) }}", "too_expensive"),
}


def fault_of(renderer: TemplateRenderer, template: str) -> str | None:
    """Return how a template fails; None if it shows nothing instead."""
    try:
        text = render(renderer, template)
    except TemplateFailed as failed:
        return failed.fault
    assert "class" not in text
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_template_hostile_is_ended_and_shows_nothing(renderer: TemplateRenderer, name: str) -> None:
    template, fault = HOSTILE[name]
    assert fault_of(renderer, template) == fault
    assert render(renderer, "{{ messages[0].role }}") == "system", "the next one is served"


def test_template_has_no_files_no_network_and_no_environment(renderer: TemplateRenderer) -> None:
    names = ("open", "os", "sys", "self", "config", "request", "get_flashed_messages")
    assert (
        render(renderer, "".join(f"{{{{ {name} is defined }}}}," for name in names if name != "self")) == "False," * 6
    )


@pytest.mark.parametrize("name", ["endless", "wide", "attribute walk", "recursion", "include", "syntax"])
def test_template_hostile_is_rejected_at_upload(renderer: TemplateRenderer, name: str) -> None:
    report = try_template(renderer, HOSTILE[name][0], {})
    assert report.refusal is not None
    assert (report.refusal.code, report.refusal.field) == ("template_rejected", "chat_template")


def test_template_that_hangs_on_tools_alone_is_rejected_at_upload(renderer: TemplateRenderer) -> None:
    template = "{% if tools %}" + HOSTILE["endless"][0] + "{% endif %}{{ messages[0].content }}"
    report = try_template(renderer, template, {})
    assert report.refusal is not None
    assert "'tools'" in report.refusal.message


def test_template_that_refuses_some_conversations_is_accepted_with_a_note(renderer: TemplateRenderer) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}ok"
    report = try_template(renderer, template, {})
    assert report.refusal is None
    assert "no system messages" in report.warnings[0].message
    assert report.checks[0].figures == {"conversations": len(TRIALS) - 1}


def test_template_that_refuses_plain_conversations_is_rejected(renderer: TemplateRenderer) -> None:
    report = try_template(renderer, "{{ raise_exception('never') }}", {})
    assert report.refusal is not None
    assert "never" in report.refusal.message
