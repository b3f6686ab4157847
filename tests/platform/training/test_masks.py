"""Masks of real families' chat templates, compared with the text: the model learns what the assistant wrote, no more.

TRL's package has the templates. Each message holds a word of its own, so a word shows in which part of the mask its
message is.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_base import byte_tokenizer

from loramux.serving.messages import ChatOptions
from loramux.serving.tokenizer import Tokenizer
from loramux.training.encoding import Encoder, Sequence
from loramux.training.examples import Example, Turn, conversation_of

found = find_spec("trl")
assert found is not None
assert found.submodule_search_locations is not None
FOLDER = Path(found.submodule_search_locations[0]) / "chat_templates"
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja")) if "_training" not in file.stem}
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_learned_text_of_a_familys_template_is_what_the_assistant_wrote(name: str) -> None:
    family = encoder(TEMPLATES[name])
    sequences = [divided(family, one) for one in family.sequences(Example(turns=TALK))]
    assert wrong_words(sequences, ("Heron", "Raven <b>answers</b>."), ("Kestrel", "Quail", "Finch")) == []
    assert all(any(word in rest for _, rest in sequences) for word in ("Kestrel", "Quail", "Finch"))


@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if "tool_calls" in text])
def test_learned_text_of_a_call_is_the_call_and_not_its_result_or_the_tools(name: str) -> None:
    family = encoder(TEMPLATES[name])
    example = Example(turns=CALLS, variables={"tools": [TOOL]})
    sequences = [divided(family, one) for one in family.sequences(example)]
    assert wrong_words(sequences, ("Osprey", "Raven answers."), ("Quail", "Magpie", "Gander", "Teal")) == []
    assert any("Magpie" in rest for _, rest in sequences)
