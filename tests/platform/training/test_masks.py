"""Masks of real families' chat templates, compared with the text: the model learns what the assistant wrote, no more.

TRL's package has the templates. Each message holds a word that no other one has, so a word shows in which part of the
mask its message is.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_base import byte_tokenizer

from loramux.serving.messages import ChatOptions
from loramux.serving.tokenizer import Tokenizer
from loramux.training.encoding import Encoder, Sequence, Unlearnable
from loramux.training.examples import Example, Turn, conversation_of

found = find_spec("trl")
assert found is not None
assert found.submodule_search_locations is not None
FOLDER = Path(found.submodule_search_locations[0]) / "chat_templates"
IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Templates that take texts as parts of a list only."""
TEMPLATES = {
    file.stem: file.read_text()
    for file in sorted(FOLDER.glob("*.jinja"))
    if "_training" not in file.stem and file.stem not in IMAGES
}
FORCED = ("deepseek_r1", "deepseekv3", "nemotron_3")
"""Beginnings of the names of templates whose prompt begins a thought that a message without one does not show."""
FOLLOWED = [name for name in TEMPLATES if not name.startswith(FORCED)]
MARK = re.compile(r"<\|?[a-zA-Z_▁｜]+\|?>|<\uff5c[^>]{1,40}\uff5c>|</s>|\[/?[A-Z_]+\]")
TALK = (
    Turn("system", "Kestrel rules."),
    Turn("user", "Quail asks?"),
    Turn("assistant", "Heron answers.", {}, is_learned=True),
    Turn("user", "Finch asks?"),
    Turn("assistant", "Raven <b>answers</b>.", {}, is_learned=True),
)
CALL = {"id": "c00000001", "type": "function", "function": {"name": "lookup", "arguments": {"bird": "Osprey"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Gander looks.",
        "parameters": {"type": "object", "properties": {"bird": {"type": "string", "description": "Teal"}}},
    },
}
CALLS = (
    Turn("user", "Quail asks?"),
    Turn("assistant", "", {"tool_calls": [CALL]}, is_learned=True),
    Turn("tool", "Magpie result.", {"tool_call_id": "c00000001", "name": "lookup"}),
    Turn("assistant", "Raven answers.", {}, is_learned=True),
)


def encoder(template: str) -> Encoder:
    """A tokenizer of bytes in which each mark of the template is one token; the mark after an answer ends it."""
    made = byte_tokenizer(template)
    marks = sorted(set(MARK.findall(template)))
    made.add_special_tokens({"additional_special_tokens": marks})
    tokenizer = Tokenizer(made)
    text = tokenizer.render(conversation_of(TALK[1:3]), ChatOptions(ending="message"))
    after = MARK.search(text, text.index("answers.")) or re.search(r"<\|eos\|>", text)
    end = made.convert_tokens_to_ids("<|eos|>" if after is None else after.group())
    return Encoder(tokenizer, {end, made.eos_token_id}, end, 1 << 16)


def divided(encoder: Encoder, sequence: Sequence) -> tuple[str, str]:
    """The learned text of a sequence, and the rest."""
    decode = encoder.tokenizer.transformers_tokenizer.decode
    pairs = list(zip(sequence.token_ids, sequence.learned, strict=True))
    learned, rest = ([token for token, is_learned in pairs if is_learned is wanted] for wanted in (True, False))
    return decode(learned), decode(rest)


def wrong_words(sequences: list[tuple[str, str]], written: tuple[str, ...], read: tuple[str, ...]) -> list[str]:
    """Words that the assistant wrote and that are learned in no sequence, or more than once, and words of the other
    messages that are learned."""
    learned = "".join(one for one, _ in sequences)
    return [word for word in written if learned.count(word) != 1] + [word for word in read if word in learned]


def runs(sequence: Sequence) -> list[tuple[int, int]]:
    """The beginning and the end of each run of learned tokens."""
    edges = [0, *sequence.learned, 0]
    changes = [place for place in range(len(edges) - 1) if bool(edges[place]) != bool(edges[place + 1])]
    return list(zip(changes[::2], changes[1::2], strict=True))


def assert_runs_are_answers(family: Encoder, sequences: list[Sequence], example: Example) -> None:
    """Each run of learned tokens follows the prompt of an answer, to the token, and ends with the answer's end."""
    found = [(one.token_ids[:begin], one.token_ids[end - 1]) for one in sequences for begin, end in runs(one)]
    prompts = []
    for number, turn in enumerate(example.turns):
        if turn.is_learned:
            options = ChatOptions(template=example.variables)
            text = family.tokenizer.render(conversation_of(example.turns[:number]), options)
            prompts.append(tuple(family.tokenizer.encode_now(text, 1 << 16, add_special_tokens=False)))
    assert [prompt for prompt, _ in found] == prompts
    assert all(end in family.stop_ids for _, end in found)


@pytest.mark.parametrize("name", FOLLOWED)
def test_learned_text_of_a_familys_template_is_what_the_assistant_wrote(name: str) -> None:
    family = encoder(TEMPLATES[name])
    user = Turn("user", "Kestrel rules. Quail asks?")
    turns = (user, *TALK[2:]) if "System role not supported" in TEMPLATES[name] else TALK
    encoded = family.sequences(Example(turns=turns))
    assert_runs_are_answers(family, encoded, Example(turns=turns))
    sequences = [divided(family, one) for one in encoded]
    assert wrong_words(sequences, ("Heron", "Raven <b>answers</b>."), ("Kestrel", "Quail", "Finch")) == []
    assert all(any(word in rest for _, rest in sequences) for word in ("Kestrel", "Quail", "Finch"))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in FOLLOWED])
def test_template_whose_prompt_begins_a_thought_refuses_answers_without_one(name: str) -> None:
    with pytest.raises(Unlearnable, match="begins the assistant's message in another way"):
        encoder(TEMPLATES[name]).sequences(Example(turns=TALK))


RECAP = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}(You asked: "
    "{{ messages[loop.index0 - 1]['content'] }}) {% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_template_that_makes_the_model_learn_a_users_text_is_found() -> None:
    family = encoder(RECAP)
    sequences = [divided(family, one) for one in family.sequences(Example(turns=TALK))]
    assert wrong_words(sequences, ("Heron", "Raven"), ("Kestrel", "Quail", "Finch")) == ["Quail", "Finch"]


@pytest.mark.parametrize("name", [name for name in FOLLOWED if "tool_calls" in TEMPLATES[name]])
def test_learned_text_of_a_call_is_the_call_and_not_its_result_or_the_tools(name: str) -> None:
    family = encoder(TEMPLATES[name])
    example = Example(turns=CALLS, variables={"tools": [TOOL]})
    encoded = family.sequences(example)
    assert_runs_are_answers(family, encoded, example)
    sequences = [divided(family, one) for one in encoded]
    assert wrong_words(sequences, ("Osprey", "Raven answers."), ("Quail", "Magpie", "Gander", "Teal")) == []
    assert any("Magpie" in rest for _, rest in sequences)
