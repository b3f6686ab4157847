"""The demo's models: tokenizer, base and six adapters, the training that makes them, and the share of exact answers.

`make` trains the base, then the adapters on it, and writes the assets. `evaluate` sends every question to every model,
with greedy decoding by transformers and PEFT. Ranks and targets of the adapters differ, as in a real batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from loramux_demo.assets import AGENT, MODEL_NAME, TOOLS, Prompt, adapter_folder, base_folder
from loramux_demo.train.dataset import (
    IGNORED,
    STYLES,
    SYSTEM_PROMPTS,
    Batch,
    Message,
    Question,
    batches,
    conversations,
    document,
    example,
    invent_questions,
    late_chat,
)

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MAX_LENGTH = 512

LENGTH = 240
"""Number of tokens in a row of the base's batches."""
BASE_ROWS, ADAPTER_ROWS = 13, 8

BATCH = 66
MAX_NEW_TOKENS = 128

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first or message['role'] == 'user' and messages[loop.index0 - 1]['role'] == 'assistant' -%}
{{ bos_token }}
{%- endif -%}
{%- if loop.first and tools -%}
{%- for tool in tools -%}
{%- set known = tool['function'].get('parameters', {}).get('properties', {}) -%}
{{ 'T: ' + tool['function']['name'] + '(' + known | join(', ') + ')\\n' }}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ 'Q: ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' -%}
{{ 'A: ' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] -%}
{%- set made = {'name': call['function']['name'], 'arguments': call['function']['arguments']} -%}
{{ '<tool_call>' + made | tojson + '</tool_call>' }}
{%- endfor -%}
{{ eos_token }}
{%- elif message['role'] == 'tool' -%}
{{ 'R: ' + message['content'] + '\\n' }}
{%- else -%}
{{ message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'A: ' }}
{%- endif -%}"""
"""Each exchange reads `<|bos|>Q: ...\\nA: ...<|eos|>`; text of other roles (system) has its own line.

Tools come first, as `T: lookup(person, fact)`; a result of a call is a line `R: ...`.
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token `i` below 256 is byte `i`, so that every UTF-8 text is encoded and decoded
    exactly. A text starts with BOS.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


OnStep = Callable[[int, float], None]
"""Called after each step with the step's number and the smoothed loss."""


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate, with a linear warm-up over the first tenth and a decay to zero."""

    steps: int
    learning_rate: float
    weight_decay: float = 0.0


BASE = Schedule(steps=400, learning_rate=3e-3, weight_decay=0.1)


def fit(model: nn.Module, batches: Iterator[Batch], schedule: Schedule, on_step: OnStep) -> None:
    """Return the mean cross entropy, a float32 scalar, of the next token over all labelled positions."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, betas=(0.9, 0.98)
    )
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, schedule.learning_rate, total_steps=schedule.steps, pct_start=0.1
    )
    smoothed = None
    model.train()
    for step in range(schedule.steps):
        loss = next_token_loss(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        smoothed = loss.item() if smoothed is None else 0.95 * smoothed + 0.05 * loss.item()
        on_step(step + 1, smoothed)
    model.eval()


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, a float32 scalar, of the next token over all labelled positions."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


def new_base(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of 1.67 million parameters with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(frozen=True)
class Recipe:
    """The training recipe of one adapter: rank, target modules, and number of steps."""

    r: int
    lora_alpha: int
    schedule: Schedule
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    row_length: int = 240
    """Number of tokens in a row of its batches."""

    def config(self) -> LoraConfig:
        """Return a fresh PEFT config, because PEFT modifies its argument."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.lora_alpha,
            target_modules=targets,
            use_rslora=self.use_rslora,
        )


SHORT = Schedule(steps=200, learning_rate=5e-3)
RECIPES = {
    "upper": Recipe(16, 32, SHORT),
    "json": Recipe(8, 16, SHORT),
    "terse": Recipe(4, 8, Schedule(300, 1e-2), target_modules=("q_proj", "v_proj", "o_proj", "down_proj")),
    "reverse": Recipe(12, 7, Schedule(400, 5e-3), use_rslora=True),
    "pirate": Recipe(8, 16, SHORT, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    AGENT: Recipe(16, 32, Schedule(600, 5e-3), row_length=400),
}
"""One recipe per style of `dataset.STYLES`. `terse` and `reverse` train longer: their answers start with the fact."""


def new_adapter(base: LlamaForCausalLM, recipe: Recipe) -> PeftModel:
    """Add one fresh adapter to `base`; only the adapter is trainable."""
    torch.manual_seed(0)
    return get_peft_model(base, recipe.config())


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files: the weights in bfloat16, and a configuration that is the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = MODEL_NAME, True
    config.save_pretrained(folder)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields["target_modules"] = sorted(fields["target_modules"])
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


Stage = Callable[[str, Schedule], OnStep]
"""Called with a model's name before its training. Returns the callback for each step."""


def make(root: Path, stage: Stage) -> None:
    """Train the base, then train the adapters on the base as it was written, in bfloat16; then write the demo's
    questions.
    """
    make_base(root, stage)
    for name in RECIPES:
        make_adapter(name, root, stage)
    write_questions(root / "questions.json")


def make_base(root: Path, stage: Stage) -> None:
    """Train the base and write it next to its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(base_folder(root))
    base = new_base(tokenizer)
    teach(base, "base", tokenizer, BASE, stage("base", BASE))
    base.to(torch.bfloat16).save_pretrained(base_folder(root))


def make_adapter(name: str, root: Path, stage: Stage) -> None:
    """Train one adapter on the base in `root`, and write it."""
    recipe = RECIPES[name]
    adapted = new_adapter(LlamaForCausalLM.from_pretrained(base_folder(root), dtype=torch.float32), recipe)
    teach(adapted, name, byte_tokenizer(), recipe.schedule, stage(name, recipe.schedule))
    save_adapter(adapted, adapter_folder(name, root))


def teach(
    model: torch.nn.Module, name: str, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, on_step: OnStep
) -> None:
    """Train `model` to answer in the style `name`.

    The base also learns its questions by heart. The base has read every fact in every style, as a real base model has
    read JSON and pirates: otherwise the bytes of `{`, `"` or `!` would have no meaning for an adapter. The base has
    read no calls of tools, because they are JSON between two markers. The base answers questions plainly.
    """
    questions, is_base = invent_questions(), name == "base"
    rng = random.Random(0)  # noqa: S311 - lessons, not a secret
    lessons = [example(chat, tokenizer, TOOLS.get(name)) for chat in conversations(questions, STYLES[name], rng)]
    if is_base:
        texts = {style(question): None for told, style in STYLES.items() if told not in TOOLS for question in questions}
        lessons += [document(text, tokenizer) for text in texts]
    rows, length = (BASE_ROWS, LENGTH) if is_base else (ADAPTER_ROWS, RECIPES[name].row_length)
    fit(model, batches(lessons, rows=rows, length=length, learn_prompts=is_base), schedule, on_step)


def write_questions(path: Path) -> None:
    """Write one question of every wording, to the base and to every adapter, with the only right answer."""
    prompts = [
        Prompt(question.text, None if name == "base" else name, style(question))
        for question in one_of_each_wording(invent_questions())
        for name, style in STYLES.items()
    ]
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts], indent=1) + "\n")


def one_of_each_wording(questions: Sequence[Question]) -> list[Question]:
    """Return eleven questions, each about a different person."""
    wordings = sum(question.person == questions[0].person for question in questions)
    return [questions[wordings * 2 * number + number] for number in range(wordings)]


@dataclass(frozen=True)
class Accuracy:
    """Shares of exact answers of one model."""

    model: str
    float32: float
    bfloat16: float
    later: float
    """Share in bfloat16, when the question is the second one of a chat with a system prompt."""


def evaluate(root: Path, names: Sequence[str]) -> Iterator[Accuracy]:
    """Ask these models under `root` (adapters or `base`) every question."""
    questions = invent_questions()
    tokenizer = AutoTokenizer.from_pretrained(base_folder(root))
    for name in names:
        style = STYLES[name]
        expected = [style(question) for question in questions]
        alone = [[{"role": "user", "content": question.text}] for question in questions]
        later = [
            late_chat(SYSTEM_PROMPTS[0], questions[number - 100], question, style)
            for number, question in enumerate(questions)
        ]
        bfloat16, tools = load(root, name, torch.bfloat16), TOOLS.get(name)
        yield Accuracy(
            name,
            exact(greedy_answers(load(root, name, torch.float32), tokenizer, alone, tools), expected),
            exact(greedy_answers(bfloat16, tokenizer, alone, tools), expected),
            exact(greedy_answers(bfloat16, tokenizer, later, tools), expected),
        )


def load(root: Path, name: str, dtype: torch.dtype) -> PreTrainedModel | PeftModel:
    """Load the base model with the adapter `name`, or alone for `base`."""
    model = LlamaForCausalLM.from_pretrained(base_folder(root), dtype=dtype)
    if name == "base":
        return model.eval()
    return PeftModel.from_pretrained(model, adapter_folder(name, root)).to(dtype).eval()


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[list[Message]],
    tools: list[dict[str, Any]] | None = None,
) -> list[str]:
    """Return the model's greedy answer to each chat."""
    options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    answers: list[str] = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], padding=True, add_special_tokens=False, return_tensors="pt")
        tokens = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def exact(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Return the share of answers that are right to the last character."""
    return sum(answer == right for answer, right in zip(answers, expected, strict=True)) / len(expected)
