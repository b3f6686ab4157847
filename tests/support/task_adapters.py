"""Adapters of the task types SEQ_CLS, TOKEN_CLS and FEATURE_EXTRACTION as PEFT saves them, and what PEFT computes with
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from adapter_zoo import EXACT
from numpy.typing import NDArray

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
TOKEN_LORA = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
"""PEFT itself refuses all-linear for classes of tokens, because it would be a LoRA of the saved head."""


class TaskAdapter:
    """One adapter of a base, with weights that matter, and PEFT's model with it."""

    def __init__(
        self,
        base: Path,
        folder: Path,
        seed: int,
        num_labels: int | None = None,
        *,
        of_tokens: bool = False,
        **lora: Any,
    ) -> None:
        """`num_labels` makes a classifier, of texts or of tokens; None an adapter for vectors."""
        torch.manual_seed(seed)
        if num_labels is None:
            model = transformers.AutoModel.from_pretrained(base, dtype=torch.float32, **EXACT)
            task = "FEATURE_EXTRACTION"
        else:
            text, token = transformers.AutoModelForSequenceClassification, transformers.AutoModelForTokenClassification
            of, task = (token, "TOKEN_CLS") if of_tokens else (text, "SEQ_CLS")
            model = of.from_pretrained(base, dtype=torch.float32, num_labels=num_labels, **EXACT)
        config = peft.LoraConfig(task_type=task, **LORA | (TOKEN_LORA if of_tokens else {}) | lora)
        self.model = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                if "lora_B" in key:
                    parameter.copy_(torch.randn(parameter.shape) * 0.15)
                elif "modules_to_save" in key:
                    parameter.copy_(torch.randn(parameter.shape) * 0.5)
        self.model.save_pretrained(folder)
        self.folder = folder

    @torch.no_grad()
    def logits(self, prompt: tuple[int, ...] | list[int]) -> NDArray[np.float32]:
        """A classifier's numbers for a prompt, or for each of its tokens."""
        return self.model(input_ids=torch.tensor([list(prompt)])).logits[0].numpy()

    @torch.no_grad()
    def vector(self, prompt: tuple[int, ...] | list[int], pooling: str) -> NDArray[np.float32]:
        """The hidden states after the last norm, pooled."""
        hidden = self.model(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0]
        return (hidden[-1] if pooling == "last" else hidden.mean(dim=0)).numpy()
