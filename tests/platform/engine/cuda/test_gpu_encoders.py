"""Encoders on the Triton kernels: vectors and classes of several adapters in one step are PEFT's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from encoder_zoo import EncoderZoo, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def test_gpu_encoder_steps_with_several_adapters_are_pefts(tmp_path: Path) -> None:
    zoo = EncoderZoo("bert", tmp_path, num_hidden_layers=2)
    models = {name: zoo.add(name, labels, r=r).model for name, labels, r in (("vectors", None, 3), ("three", 3, 17))}
    texts = [[5, 6, 7], [8] * 9, [11, 12], [5, 9, 9, 9, 20]]
    asked = [
        zoo.request(f"r{i}", adapter, text, "classify" if adapter == "three" else "cls")
        for i, (adapter, text) in enumerate(zip(("vectors", "three", None, "three"), texts, strict=True))
    ]
    engine = zoo.engine(device=DEVICE, max_num_seqs=4)
    engine._runner.bank.pool.fill_(float("nan"))
    ends = run(engine, asked, arrivals=4)
    for request, text in zip(asked, texts, strict=True):
        model = zoo.plain if request.adapter is None else models[request.adapter.digest]
        output = model(input_ids=torch.tensor([text]))
        wanted = output.logits[0] if request.pooling == "classify" else output.last_hidden_state[0, 0]
        found = np.frombuffer(ends[request.id].pooled, dtype=np.float32)
        np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5 * max(1.0, float(wanted.abs().max())))
