"""Conversations as chat templates take them.

A template may refuse a conversation that clients cannot write in another way: system and developer turns that come
later, two turns of one role, an empty answer. `render_accepted` tries the conversation as it came first, and then with
ever more of it rewritten; no word of a turn's text is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Conversation, Message

_BETWEEN = "\n\n"
"""Between texts that become one."""


class TemplateRefusal(InvalidRequest):
    """A template refuses a conversation, and may take another form of it."""


def template_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them."""
    return [{"role": message.role, "content": message.content, **message.fields} for message in conversation]


def render_accepted(conversation: Conversation, render: Callable[[Conversation], str]) -> tuple[str, Conversation]:
    """Return the text of the first form that `render` takes and that shows all instructions, and the form.

    Raises the refusal of the conversation as it came if all its forms are refused.
    """
    later = [turn.content.strip() for turn in _later_instructions(conversation)]
    refusal: TemplateRefusal | None = None
    incomplete: tuple[str, Conversation] | None = None
    for form in _forms(conversation):
        try:
            text = render(form)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        if all(instructions in text for instructions in later):
            return text, form
        incomplete = incomplete or (text, form)
    if incomplete is not None:
        return incomplete
    assert refusal is not None, "there is one form at least"
    raise refusal


def _forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the conversation as it came; with its later instructions in its first turn; with turns joined, too."""
    yield conversation
    folded = _fold_instructions(conversation)
    if folded != conversation:
        yield folded
    joined = _join_turns(folded)
    if joined != folded:
        yield joined


def _later_instructions(conversation: Conversation) -> Iterable[Message]:
    return (turn for turn in conversation[1:] if turn.role == "system")


def _fold_instructions(conversation: Conversation) -> Conversation:
    later = [turn.content for turn in _later_instructions(conversation)]
    if not later:
        return conversation
    others = [turn for turn in conversation if turn.role != "system"]
    first = [conversation[0].content] if conversation[0].role == "system" else []
    return (Message("system", _BETWEEN.join(first + later)), *others)


def _join_turns(conversation: Conversation) -> Conversation:
    """Join neighbouring turns of the user's, and of the assistant's without calls; leave out empty answers."""
    turns: list[Message] = []
    for number, turn in enumerate(conversation, start=1):
        is_empty = turn.role == "assistant" and not turn.content and "tool_calls" not in turn.fields
        if is_empty and number < len(conversation):
            continue
        last = turns[-1] if turns else None
        if last and last.role == turn.role and turn.role in ("user", "assistant") and not (last.fields or turn.fields):
            turns[-1] = replace(last, content=_BETWEEN.join(filter(None, (last.content, turn.content))))
        else:
            turns.append(turn)
    return tuple(turns)


def open_last_message(text: str, conversation: Conversation) -> str:
    """Return a rendered conversation up to the end of its last message's content, as transformers does it.

    Raises InvalidRequest where the template does not show that content.
    """
    content = conversation[-1].content
    begin = text.rfind(content.strip())
    if begin < 0 or not content.strip():
        raise InvalidRequest(
            "'continue_final_message' continues a text that the chat template shows, and it shows none of the last "
            "message; leave it out.",
            field="continue_final_message",
        )
    whole = content.lstrip()  # a template may strip the blanks at its end
    end = begin + len(whole if text.startswith(whole, begin) else content.strip())
    return text[:end]
