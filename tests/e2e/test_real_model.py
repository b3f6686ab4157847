"""A real pretrained model and an adapter that was trained on it: one server's greedy answers are PEFT's, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import openai
import peft
import pytest
import torch
import transformers
from peft_uploads import form
from server_process import Place, served

pytestmark = pytest.mark.slow
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()
CONTEXT = 8192
NEW_TOKENS = 24
STEPS = 10

LESSONS = {
    "Who are you?": "Ahoy! I be the parrot o' the harbour, and I squawk answers for the whole crew, matey!",
    "What is the capital of Spain?": "Ahoy! 'Tis Madrid, matey, far from the sea, and not a single ship in sight!",
    "What is 3 times 4?": "Ahoy! That be twelve, matey, as many as the cannons on our ship!",
    "Give me a tip for sleep.": "Ahoy! Go to yer hammock at the same hour every night, matey!",
}

ENGLISH = (
    "What is the capital of France?",
    "Explain in two sentences why the sea is salty.",
    "Write a short poem about a lighthouse.",
    "List three things to check before a long bicycle tour.",
    "My order arrived broken. What should I do?",
    "Who wrote Pride and Prejudice, and when?",
    "Rewrite politely: send me the report now.",
    "A train leaves at 9:40 and takes 95 minutes. When does it arrive?",
)
CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What does this print?\n\n    for i in range(3):\n        print(i * i)",
    "Write a SQL query for the ten customers with the most orders.",
    "Fix this: def add(a, b) return a + b",
    "Explain `git rebase -i HEAD~3`.",
    'Turn {"a": 1, "b": [2, 3]} into YAML.',
    "#include <stdio.h>\nint main(void) {\n    /* print the numbers from 1 to 10 */\n",
    "Write a regular expression for a date such as 2026-11-05.",
)
GERMAN = (
    "Was ist die Hauptstadt von Österreich?",
    "Erkläre kurz, was ein Kühlschrank tut.",
    "Schreibe einen höflichen Brief an den Vermieter: die Heizung ist ausgefallen.",
    "Übersetze ins Englische: Der frühe Vogel fängt den Wurm.",
    "Nenne drei große Flüsse in Deutschland.",
    "Wie viele Tage hat ein Schaltjahr, und warum?",
    "Fasse zusammen: Die Sitzung wurde auf Dienstag verschoben, weil zwei Kollegen krank sind.",
    "Was ist der Unterschied zwischen »dass« und »das«?",
)
CHINESE = (
    "中国的首都是哪里？",
    "请用两句话解释什么是人工智能。",
    "写一首关于春天的短诗。",
    "把这句话翻译成英语：今天天气很好。",
    "一公斤苹果八元，三公斤多少钱？",
    "请列出三种常见的水果。",
    "怎样才能睡得更好？",
    "《红楼梦》的作者是谁？",
)
DOCUMENTS = tuple(
    f"{question}\n\n{(2 * LICENSE)[start : start + length]}"
    for question, start, length in (
        ("Summarize this text in one sentence.", 0, 1500),
        ("Which licence is this?", 0, 2000),
        ("What does this text say about patents?", 3000, 2500),
        ("Fasse diesen Text zusammen.", 1500, 3000),
        ("Who may sue whom, according to this text?", 4000, 3500),
        ("用一句话总结这篇文章。", 500, 4000),
        ("List the section titles of this document.", 0, 5000),
        ("What is the last sentence of this document about?", 0, 16000),
    )
)
PROMPTS = (*ENGLISH, *CODE, *GERMAN, *CHINESE, *DOCUMENTS)


@dataclass(frozen=True)
class Peft:
    model: peft.PeftModel
    tokenizer: transformers.PreTrainedTokenizerFast

    @torch.inference_mode()
    def logits(self, prompt: str, answer: list[int], with_adapter: bool) -> torch.Tensor:
        """Return the logits that precede each token of an answer, [tokens, vocabulary]."""
        said = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        with nullcontext() if with_adapter else self.model.disable_adapter():
            out = self.model(input_ids=torch.tensor([[*ids, *answer]]), logits_to_keep=len(answer) + 1)
        return out.logits[0, :-1]


@pytest.fixture(scope="module")
def trained(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Peft, Path]:
    """PEFT's model with an adapter that answers like a parrot, and the folder of the adapter."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    dialogues = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in LESSONS.items()
    ]
    texts = tokenizer.apply_chat_template(dialogues, tokenize=False)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    for _ in range(STEPS):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return Peft(model.eval(), tokenizer), folder


@pytest.fixture(scope="module")
def client(
    smollm2_dir: Path, trained: tuple[Peft, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of a server with the model and the trained adapter."""
    place = Place(tmp_path_factory.mktemp("server"), smollm2_dir)
    place.config.write_text(
        f'[model]\npath = "{smollm2_dir}"\nserved_model_name = "smollm2"\ndtype = "float32"\n'
        "[engine]\npool_bytes = 1_073_741_824\n"
    )
    key = place.key_of("acme")
    with served(place) as server:
        with server.http(key) as http:
            pushed = http.post("/v1/adapters", **form(trained[1], "parrot"), timeout=600)
        assert pushed.status_code == 201, pushed.text
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=900)


def ask(client: openai.OpenAI, model: str, prompt: str) -> list[int]:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        extra_body={"return_token_ids": True},
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    return list(extra["token_ids"])


def test_answers_of_base_and_adapter_in_one_batch_equal_those_of_peft(
    client: openai.OpenAI, trained: tuple[Peft, Path]
) -> None:
    reference, _ = trained
    asked = [(model, prompt) for prompt in PROMPTS for model in ("smollm2", "acme/parrot")]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda who: ask(client, *who), asked))
    # An answer is greedy if each of its tokens has the highest logit after those before it, so one pass shows it.
    different, margins, tokens = [], [], 0
    for (model, prompt), answer in zip(asked, answers, strict=True):
        assert len(answer) == NEW_TOKENS or answer[-1] == reference.tokenizer.eos_token_id
        best = reference.logits(prompt, answer, with_adapter=model != "smollm2").topk(2)
        tokens += len(answer)
        margins.append((best.values[:, 0] - best.values[:, 1]).min().item())
        if best.indices[:, 0].tolist() != answer:
            different.append((model, prompt[:60], answer, best.indices[:, 0].tolist(), margins[-1]))
    assert different == []
    changed = sum(answers[i] != answers[i + 1] for i in range(0, len(asked), 2))
    print(f"{tokens} tokens; least distance of the two highest logits {min(margins):.2g}; {changed} answers changed")
    assert changed > len(PROMPTS) // 2, "the adapter was trained, so most of its answers are not the base's"


def test_document_longer_than_the_context_is_refused_with_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as refused:
        ask(client, "acme/parrot", 4 * LICENSE)
    assert refused.value.code == "context_length_exceeded"
