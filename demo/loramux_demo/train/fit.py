"""The training loop, and the untrained base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loramux_demo.train.examples import IGNORED, Batch
from loramux_demo.train.tokenizer import MAX_LENGTH

Progress = Callable[[int, float], None]
"""Called after each step with the step's number and the smoothed loss."""


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate, with a linear warm-up over the first tenth and a decay to zero."""

    steps: int
    learning_rate: float
    weight_decay: float = 0.0


def fit(model: nn.Module, batches: Iterator[Batch], schedule: Schedule, progress: Progress) -> None:
    """Train the parameters that require a gradient, in bfloat16 with float32 weights; leaves the model in eval mode."""
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
        progress(step + 1, smoothed)
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
