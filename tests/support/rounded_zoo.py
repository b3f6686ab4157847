"""Bases whose weights are quantized when they are loaded, and their dequantized twins, on which PEFT runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from formats import FormatZoo
from transformers import AutoModelForCausalLM

from loramux_adapters.base import expert_parameters, expert_weights, mixtures
from loramux_kernels.quantized_weight import Quantization, quantize


class RoundedZoo(FormatZoo):
    """A base in `served`, and in `base` its twin, whose linears and experts are rounded by `quantization`."""

    def __init__(
        self, family: str, root: Path, quantization: Quantization, formats: Sequence[str], **fields: Any
    ) -> None:
        super().__init__(family, root, formats, **fields)
        self.served = root / "served"
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model.save_pretrained(self.served)
        weights = [
            m.weight for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"
        ]
        for mixture in mixtures(model):
            experts = mixture.module.experts
            weights += [one for name in expert_parameters(experts) for one in expert_weights(experts, name)]
        with torch.no_grad():
            for weight in weights:
                weight.copy_(quantize(weight, quantization).dequantize())
        model.save_pretrained(self.base)
