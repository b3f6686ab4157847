"""PEFT in float32 as the oracle of greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from loramux.data.storage.blobs import place_of


class PeftOracle:
    """A base with one adapter, as PEFT loads it."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        images = (base / "preprocessor_config.json").is_file() or (base / "processor_config.json").is_file()
        auto: Any = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(base, dtype=torch.float32)
        self.model = peft.PeftModel.from_pretrained(model, adapter).eval()

    @torch.inference_mode()
    def greedy(self, messages: Sequence[dict[str, Any]], answer: Sequence[int]) -> tuple[list[int], float]:
        """Return the greedy token after each prefix of an answer, and the least distance of the two highest logits."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        logits = self.model(input_ids=torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits
        best = logits[0, :-1].topk(2)
        return best.indices[:, 0].tolist(), float((best.values[:, 0] - best.values[:, 1]).min())


def stored_adapter(place_folder: Path, digest: str) -> Path:
    """The folder of a revision's files in the store of a server with the default settings."""
    return place_folder / "var/blobs" / place_of(digest)
