"""Compare an encoder's vectors or classes with those of PEFT on transformers' own class for the adapter's task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from loramux.engine.execution.checkpoint import load_checkpoint
from loramux.engine.execution.encoders import read_dense
from loramux_adapters.components import PREFIX, AdapterPlan
from loramux_adapters.config import Task
from loramux_adapters.families import Encoder
from loramux_adapters.plan import WEIGHTS_NAME
from loramux_adapters.weights_file import read_header


class EncoderOutputs(NamedTuple):
    """PEFT's numbers of some prompts, float32 `[prompts or their tokens, numbers]`."""

    adapted: torch.Tensor
    plain: torch.Tensor
    """The same with the base's own layers; a trained head stays."""


@torch.inference_mode()
def peft_outputs(
    model_dir: str, folder: str, encoder: Encoder, task: Task, plan: AdapterPlan, prompts: list[list[int]]
) -> EncoderOutputs:
    """Return the numbers of each label (of each token: TOKEN_CLS), or the vectors of the first token of other adapters.

    An adapter for vectors may have been trained on the model without its head, or around it: its names say which.
    """
    keys = read_header(Path(folder) / WEIGHTS_NAME).tensors
    has_head = plan.classifier is not None
    if has_head or any(key.startswith(f"{PREFIX}{encoder.body}.") for key in keys):
        labels = {} if plan.classifier is None else {"num_labels": plan.classifier.num_labels}
        kind = AutoModelForTokenClassification if task == "TOKEN_CLS" else AutoModelForSequenceClassification
        base = kind.from_pretrained(model_dir, dtype=torch.float32, ignore_mismatched_sizes=True, **labels)
    elif encoder.body:
        base = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    else:  # the checkpoint may be that of a larger model
        base = load_checkpoint(Path(model_dir), "float32", torch.device("cpu"))
    config = peft.PeftConfig.from_pretrained(folder)
    if getattr(config, "init_lora_weights", True) is False:
        config.init_lora_weights = True  # modules that the file lacks would get random weights otherwise
    dense = read_dense(Path(model_dir), getattr(base.config.get_text_config(), encoder.width_field))
    model = peft.PeftModel.from_pretrained(base.eval(), folder, config=config).eval()

    def numbers(prompt: list[int]) -> torch.Tensor:
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
        if has_head:
            logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
            return logits.float().view(-1, logits.shape[-1])
        body = getattr(model.get_base_model(), encoder.body, model.get_base_model())
        vectors: torch.Tensor = dense(body(input_ids=ids, attention_mask=mask).last_hidden_state[0, :1].float())
        return vectors

    adapted = torch.cat([numbers(prompt) for prompt in prompts])
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(False)
    return EncoderOutputs(adapted, torch.cat([numbers(prompt) for prompt in prompts]))
