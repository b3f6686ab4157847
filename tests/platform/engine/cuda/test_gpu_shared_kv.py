"""Layers that share KV and read separate rows of tokens, on a GPU: recorded, token for token with PEFT."""

from __future__ import annotations

import torch
from adapter_zoo import RECIPES, Asked, Zoo, serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["sliding_attention", "full_attention"]
IMAGE = 90
"""The id of a placeholder for an image, which the model reads as padding."""


def test_gpu_steps_of_layers_with_their_own_inputs_answer_as_peft_does(tmp_path, caplog) -> None:
    zoo = Zoo("gemma4_images", tmp_path, num_hidden_layers=4, layer_types=KINDS * 2, num_kv_shared_layers=2)
    zoo.make_adapter("plain", RECIPES["plain"], 1)
    prompts = [(5, 6, 7), (11, IMAGE, 12), tuple(range(3, 25))]
    asked = [Asked(f"r{i}", ["plain", None][i % 2], prompt, 3 + i) for i, prompt in enumerate(prompts)]
    engine = zoo.engine(device=DEVICE, max_num_seqs=2, max_model_len=64, block_size=32)
    engine._runner.bank.pool.fill_(float("nan"))
    assert serve(zoo, engine, asked) == {request.name: zoo.answer(request) for request in asked}
    assert "without CUDA graphs" not in caplog.text
