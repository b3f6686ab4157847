"""TRL's AsyncGRPO loop against a server: `python trl_loop.py BASE URL FOLDER STEPS`, run by tests/e2e/test_trl_loop.py.

TRL asks for vLLM's package, and for a GPU's attention kernel and name. The test's folder has an empty package of that
name, and this file computes the attention with torch. Everything else is TRL's: its clients, its rollout process, its
trainer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RATE = 1e-2
MAX_STALENESS = 4


def share_of_low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of tokens below 128, which is a half at the start."""
    return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def attend(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """flash_attn_varlen_func for causal segments whose queries are the last of their keys."""
    parts = []
    for i in range(len(cu_q) - 1):
        q, k = query[cu_q[i] : cu_q[i + 1]], key[cu_k[i] : cu_k[i + 1]]
        v, groups = value[cu_k[i] : cu_k[i + 1]], query.shape[1] // key.shape[1]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        k, v = (one.repeat_interleave(groups, 1).transpose(0, 1) for one in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k, v, attn_mask=mask, scale=softmax_scale
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def main(base: str, url: str, folder: str, steps: str) -> None:
    import datasets
    import peft
    import transformers
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = qwen3_chat_template
    prompts = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
    arguments = AsyncGRPOConfig(
        output_dir=folder,
        vllm_server_base_url=url,
        max_steps=int(steps),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_staleness=MAX_STALENESS,
        learning_rate=RATE,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        token_budget=-1,
    )
    trainer = AsyncGRPOTrainer(
        model=base,
        reward_funcs=share_of_low_bytes,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    load, loads = trainer.vllm_client.load_lora_adapter, []

    def timed(*asked: Any, **more: Any) -> None:
        began = time.perf_counter()
        load(*asked, **more)
        loads.append(time.perf_counter() - began)

    trainer.vllm_client.load_lora_adapter = timed
    trainer.train()
    result = {"log": trainer.state.log_history, "version": trainer.model_version, "load_seconds": loads}
    Path(folder, "result.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
