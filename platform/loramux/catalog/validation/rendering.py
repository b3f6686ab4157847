"""Customers' chat templates, rendered in limited processes: for requests, and on trial conversations at upload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loramux.catalog.validation.jobs import Check, RenderedText, RenderJob, ReportWarning, ValidationReport
from loramux.common.errors import Rejection
from loramux.common.sandbox.sandbox import JobCrashed, JobEnded, JobLimits, JobOutOfMemory, Sandbox

RENDER_SECONDS = 0.05
"""Processor time of one rendering, including the compilation of the template, in seconds."""
WALL_SECONDS = 5.0
"""Maximum elapsed time of one rendering in seconds. This is a safety net for an overloaded machine, because a template
itself cannot wait.
"""
RENDER_BYTES = 64 << 20
TEMPLATE_CHECK = "template"
TRIAL_CHARACTERS = 1 << 20


class TemplateFailed(Exception):
    """A template gave no text. `fault` is a fault of RenderedText, or `too_expensive` if the process was ended."""

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


class TemplateRenderer:
    """Renders templates, each time in a separate process. The call blocks, so use it from a thread."""

    def __init__(self) -> None:
        # The priority is below the engine's threads, and above uploads, because requests wait for it.
        self._sandbox = Sandbox("loramux.catalog.validation.template", b"", niceness=5)

    def render(self, template: str, variables: Mapping[str, Any], max_characters: int) -> str:
        """Return the text. Raises TemplateFailed, or SandboxDied while no process can be started."""
        job = RenderJob(template=template, variables=dict(variables), max_characters=max_characters)
        try:
            ended = self._sandbox.run(msgspec.json.encode(job), JobLimits(RENDER_BYTES, RENDER_SECONDS, WALL_SECONDS))
        except JobEnded:
            limit = f"{RENDER_SECONDS * 1000:g} ms of processor time"
            raise TemplateFailed("too_expensive", f"it takes more than {limit}") from None
        except JobOutOfMemory:
            raise TemplateFailed("too_expensive", f"it takes more than {RENDER_BYTES} bytes of memory") from None
        except JobCrashed as error:
            raise TemplateFailed("refused", str(error)) from None
        rendered = msgspec.json.decode(ended.value, type=RenderedText)
        if rendered.fault is not None:
            raise TemplateFailed(rendered.fault, rendered.reason)
        return rendered.text

    def close(self) -> None:
        """Stop the warm process."""
        self._sandbox.close()


def _turn(role: str, content: str | None, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


_ASKED = _turn("user", "What is the weather in Paris?")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call_000", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}

TRIALS: Mapping[str, dict[str, Any]] = {
    "plain": {"messages": [_ASKED]},
    "system": {"messages": [_turn("system", "You are terse."), _ASKED]},
    "turns": {"messages": [*(_turn(role, f"turn {i}") for i in range(20) for role in ("user", "assistant")), _ASKED]},
    "tools": {"messages": [_ASKED], "tools": [_TOOL]},
    "tool_results": {
        "messages": [
            _ASKED,
            _turn("assistant", "", tool_calls=[_CALL]),
            _turn("tool", '{"celsius": 21}', name="get_weather", tool_call_id="call_000"),
        ],
        "tools": [_TOOL],
    },
    "empty": {"messages": [_turn("user", "")]},
    "code_in_content": {"messages": [_turn("user", "{{ 7 * 7 }}{% raw %}{{ ''.__class__ }}</s><|im_end|>\x00\u202e")]},
    "long": {"messages": [_turn("user", "naïve 日本 🙂\n" * 2000)]},
    "odd_roles": {"messages": [_turn("assistant", "first"), _turn("critic", "second"), _turn("user", "third")]},
}
"""Conversations with which every template is tried. The template must render the first conversation, and may refuse the
others.
"""

_FATAL = ("too_expensive", "too_long", "forbidden", "invalid")


def try_template(renderer: TemplateRenderer, template: str, special_tokens: Mapping[str, str]) -> ValidationReport:
    """Report on a template. The template is refused if it fails with the plain conversation, or exceeds its limits with
    any other conversation.
    """
    refused: list[str] = []
    for name, conversation in TRIALS.items():
        try:
            more = {key: value for key, value in conversation.items() if key != "messages"}
            variables = template_variables(special_tokens, conversation["messages"], **more)
            renderer.render(template, variables, TRIAL_CHARACTERS)
        except TemplateFailed as failed:
            if failed.fault in _FATAL or name == "plain":
                message = f"The chat template cannot be served: on the conversation {name!r} {failed.reason}."
                check = Check(name=TEMPLATE_CHECK, outcome="failed", detail=message)
                refusal = Rejection(code="template_rejected", field="chat_template", message=message)
                return ValidationReport(checks=(check,), refusal=refusal)
            refused.append(f"{name} ({failed.reason})")
    return ValidationReport(
        checks=(Check(name=TEMPLATE_CHECK, outcome="passed", figures={"conversations": len(TRIALS) - len(refused)}),),
        warnings=_warnings(refused),
    )


def template_variables(
    special_tokens: Mapping[str, str], messages: Sequence[Mapping[str, Any]], /, **more: object
) -> dict[str, Any]:
    """Return the variables of a template, by transformers' names; those of `more` come from the request.

    A caller chooses the names of `more`, so they are not parameters of this function, and cannot replace a special
    token.
    """
    prompt = {"tools": None, "documents": None, "add_generation_prompt": True}
    return {**prompt, **more, "messages": messages, **special_tokens}


def _warnings(refused: Sequence[str]) -> tuple[ReportWarning, ...]:
    if not refused:
        return ()
    message = f"The chat template refuses some trial conversations: {'; '.join(refused)[:1000]}."
    return (ReportWarning(code="template_refuses", field="chat_template", message=message),)
