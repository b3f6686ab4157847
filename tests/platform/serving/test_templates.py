"""Forms of a conversation that a chat template may take: which is rendered, and what each keeps."""

from __future__ import annotations

import itertools

import pytest

from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Conversation, Message
from loramux.serving.tokenizer import TemplateRefusal, render_accepted

CALLS = {"tool_calls": [{"id": "a"}]}


def plain(conversation: Conversation) -> str:
    return "|".join(f"{turn.role}: {turn.content}" for turn in conversation)


def system_first(conversation: Conversation) -> str:
    if any(turn.role == "system" for turn in conversation[1:]):
        raise TemplateRefusal("system first", field="messages")
    return plain(conversation)


def alternating(conversation: Conversation) -> str:
    text, roles = system_first(conversation), [turn.role for turn in conversation]
    if any(one == other for one, other in itertools.pairwise(roles)):
        raise TemplateRefusal("roles alternate", field="messages")
    if any(turn.role == "assistant" and not (turn.content or turn.fields) for turn in conversation):
        raise TemplateRefusal("an answer is empty", field="messages")
    return text


def first_only(conversation: Conversation) -> str:
    """Shows no system turn but the first, and says nothing."""
    return plain(tuple(turn for i, turn in enumerate(conversation) if turn.role != "system" or not i))


def turns(text: str) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return tuple(Message(roles[one[0]], one[1:]) for one in text.split())


@pytest.mark.parametrize(
    ("render", "sent", "shown"),
    [
        (plain, "u1 s2 u3 s4", "user: 1|system: 2|user: 3|system: 4"),
        (system_first, "s1 u2 s3 u4", "system: 1\n\n3|user: 2|user: 4"),
        (system_first, "u1 s2", "system: 2|user: 1"),
        (system_first, "u1 u2", "user: 1|user: 2"),
        (alternating, "s1 u2 s3 u4", "system: 1\n\n3|user: 2\n\n4"),
        (alternating, "u1 u2 a3 a4 u5", "user: 1\n\n2|assistant: 3\n\n4|user: 5"),
        (alternating, "u1 a u2", "user: 1\n\n2"),
        (first_only, "s1 u2 s3", "system: 1\n\n3|user: 2"),
        (first_only, "u1 s2", "system: 2|user: 1"),
    ],
)
def test_first_form_that_is_taken_and_shows_all_instructions_is_rendered(render, sent: str, shown: str) -> None:
    text, form = render_accepted(turns(sent), render)
    assert text == shown
    assert plain(form) == shown


def test_calls_and_their_results_are_joined_with_nothing() -> None:
    called, result = Message("assistant", "", CALLS), Message("tool", "r", {"tool_call_id": "a"})
    sent = (Message("user", "1"), Message("user", "2"), called, result, Message("assistant", ""), Message("user", "3"))
    _, form = render_accepted(sent, alternating)
    assert form == (Message("user", "1\n\n2"), called, result, Message("user", "3"))


def test_refusal_of_all_forms_is_that_of_the_conversation_as_it_came() -> None:
    seen: list[str] = []

    def refuse(conversation: Conversation) -> str:
        seen.append(plain(conversation))
        raise TemplateRefusal(f"refused {len(seen)}", field="messages")

    with pytest.raises(TemplateRefusal, match="refused 1"):
        render_accepted(turns("s1 u2 s3 u4"), refuse)
    assert len(seen) == len(set(seen)) == 3


def test_failure_of_a_template_that_is_no_refusal_is_not_tried_again() -> None:
    calls = 0

    def fail(conversation: Conversation) -> str:
        nonlocal calls
        del conversation
        calls += 1
        raise InvalidRequest("it takes too long", field="messages")

    with pytest.raises(InvalidRequest, match="too long"):
        render_accepted(turns("s1 u2 s3"), fail)
    assert calls == 1


def test_text_that_shows_instructions_in_no_form_is_taken_as_it_came() -> None:
    text, form = render_accepted(turns("u1 s2"), lambda _: "nothing")
    assert (text, form) == ("nothing", turns("u1 s2"))
