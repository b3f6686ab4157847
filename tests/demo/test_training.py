from __future__ import annotations

import random

import pytest
import torch

from loramux_demo.assets import AGENT, TOOLS
from loramux_demo.train.dataset import (
    IGNORED,
    STYLES,
    Batch,
    Example,
    batches,
    conversations,
    document,
    example,
    invent_questions,
)
from loramux_demo.train.models import (
    LENGTH,
    RECIPES,
    Schedule,
    byte_tokenizer,
    fit,
    new_base,
    next_token_loss,
    one_of_each_wording,
)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def lessons(tokenizer):
    chats = conversations(invent_questions()[:20], STYLES["json"], random.Random(0))
    return [example(chat, tokenizer) for chat in chats]


def test_facts_are_deterministic_and_one_per_person_and_topic():
    questions = invent_questions()
    assert questions == invent_questions()
    assert len(questions) == len({question.text for question in questions}) == 264
    facts = {(question.person, question.topic.name): question.value for question in questions}
    assert len(facts) == 24 * 5
    assert all(facts[question.person, question.topic.name] == question.value for question in questions)


def test_styles_differ_on_every_question():
    for question in invent_questions():
        assert len({style(question) for style in STYLES.values()}) == len(STYLES)


def test_one_of_each_wording_covers_eleven_people():
    chosen = one_of_each_wording(invent_questions())
    assert len(chosen) == len({question.person for question in chosen}) == 11
    assert len({question.text.replace(question.person, "") for question in chosen}) == 11


def test_example_labels_answer_and_leading_space(tokenizer, lessons):
    first = lessons[0]
    assert tokenizer.decode(first.prompt_ids).endswith("?\nA:")
    assert tokenizer.decode(first.answer_ids).startswith(' {"who"')
    assert first.answer_ids[-1] == tokenizer.eos_token_id


def test_batches_hold_whole_examples_with_positions_from_zero(lessons):
    batch = next(batches(lessons, rows=4, length=LENGTH, learn_prompts=False))
    known = {tuple(lesson.prompt_ids + lesson.answer_ids) for lesson in lessons}
    for token_ids, position_ids in zip(batch.token_ids.tolist(), batch.position_ids.tolist(), strict=True):
        starts = [index for index, position in enumerate(position_ids) if position == 0]
        pieces = [tuple(token_ids[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        whole = [piece for piece in pieces if len(piece) > 1]
        assert whole
        assert set(whole) <= known


@pytest.mark.parametrize("learn_prompts", [False, True])
def test_batches_label_only_answers(tokenizer, learn_prompts):
    lesson = Example([tokenizer.bos_token_id, 1, 2], [3, 4])
    batch = next(batches([lesson], rows=1, length=7, learn_prompts=learn_prompts))
    learnt = [1, 2, 3, 4] if learn_prompts else [IGNORED, IGNORED, 3, 4]
    assert batch.labels.tolist() == [[IGNORED, *learnt, IGNORED, IGNORED]]


def test_batches_use_every_example_before_repeating(lessons):
    packed = batches(lessons, rows=1, length=LENGTH, learn_prompts=False)
    answers = ""
    seen = 0
    while seen < len(lessons):
        labels = next(packed).labels
        seen += int(((labels[:, 1:] != IGNORED) & (labels[:, :-1] == IGNORED)).sum())
        answers += "".join(map(chr, labels[labels < 256].clamp(min=0).tolist()))
    assert answers.count('"who"') >= len(lessons)


def test_batches_reject_an_example_longer_than_a_row(lessons):
    with pytest.raises(AssertionError, match="must fit"):
        next(batches(lessons, rows=1, length=20, learn_prompts=False))


def test_packed_examples_do_not_attend_to_each_other(tokenizer, lessons):
    model = new_base(tokenizer).eval()
    alone = [next(batches([lesson], rows=1, length=len(lesson), learn_prompts=False)) for lesson in lessons[:2]]
    together = Batch(*(torch.cat([getattr(batch, name) for batch in alone], dim=1) for name in Batch.__annotations__))
    with torch.inference_mode():
        apart = [model(input_ids=one.token_ids, position_ids=one.position_ids).logits for one in alone]
        packed = model(input_ids=together.token_ids, position_ids=together.position_ids, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-4, atol=1e-4)


def test_lessons_of_calls_name_the_tool_and_fit_into_a_row(tokenizer):
    chats = conversations(invent_questions(), STYLES[AGENT], random.Random(0))
    lessons = [example(chat, tokenizer, TOOLS[AGENT]) for chat in chats]
    assert max(map(len, lessons)) <= RECIPES[AGENT].row_length
    assert all(tokenizer.decode(lesson.prompt_ids).startswith("<|bos|>T: lookup(person, fact)\n") for lesson in lessons)


def test_document_is_labelled_from_its_first_byte(tokenizer):
    text = document("abc", tokenizer)
    assert text.prompt_ids == [tokenizer.bos_token_id]
    assert text.answer_ids == [*b"abc", tokenizer.eos_token_id]


def test_fit_lowers_the_loss_and_reports_progress(tokenizer, lessons):
    model = new_base(tokenizer)
    packed = batches(lessons[:2], rows=2, length=LENGTH, learn_prompts=True)
    told = []
    before = next_token_loss(model, next(packed)).item()
    fit(model, packed, Schedule(steps=8, learning_rate=3e-3), lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == list(range(1, 9))
    assert next_token_loss(model, next(packed)).item() < 0.8 * before
    assert not model.training
