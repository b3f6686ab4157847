"""Prompts with images for tiny models of text and images: as the engine gets them, and transformers' answers."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapter_zoo import Asked, Zoo, to_request
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from loramux.engine.messages import ImageInput, Request, ServiceClass

PAD, START, END = 90, 92, 93
"""Tokens of `adapter_zoo.with_images`: the placeholder, and the marks around an image's placeholders."""


def save_processor(base: Path, patch_size: int = 4) -> None:
    """Save the processor of images of at most 1,024 pixels into a base's folder."""
    size = {"shortest_edge": 64, "longest_edge": 1024}
    Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, size=size).save_pretrained(base)


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Make an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@dataclass(frozen=True)
class Pictured:
    """A greedy request whose prompt has images: each part is a list of tokens or an image."""

    name: str
    adapter: str | None
    parts: tuple[tuple[int, ...] | Image.Image, ...]
    output: int
    tenant: str = "t"
    service_class: ServiceClass = ServiceClass.STANDARD


class ImageZoo:
    """A `Zoo` of a model of text and images whose prompts have images."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        save_processor(zoo.base)
        self._processor: Any = AutoImageProcessor.from_pretrained(zoo.base, backend="pil")

    def request(self, asked: Pictured | Asked, **fields: Any) -> Request:
        """Return the request as the serving layer sends it."""
        if isinstance(asked, Asked):
            return to_request(self.zoo, asked)
        tokens: list[int] = []
        images: list[ImageInput] = []
        for part in asked.parts:
            if isinstance(part, tuple):
                tokens += part
                continue
            patches, grid = self._patches(part, do_rescale=False, do_normalize=False)
            data = patches.astype(np.uint8).tobytes()
            count = int(np.prod(grid)) // 4
            digest = hashlib.sha256(repr(grid).encode() + data).hexdigest()
            start = len(tokens) + 1
            images.append(ImageInput(digest=digest, patches=data, grid=grid, start=start, num_tokens=count))
            tokens += [START, *[PAD] * count, END]
        plain = to_request(self.zoo, Asked(asked.name, asked.adapter, tuple(tokens), asked.output), **fields)
        return Request(
            id=plain.id,
            tenant=asked.tenant,
            prompt_token_ids=tokens,
            images=tuple(images),
            sampling=plain.sampling,
            adapter=plain.adapter,
            service_class=asked.service_class,
        )

    @torch.no_grad()
    def answer(self, asked: Pictured | Asked) -> list[int]:
        """Return the greedy tokens of transformers' own class with PEFT."""
        if isinstance(asked, Asked):
            return self.zoo.answer(asked)
        prompt = torch.tensor([self.request(asked).prompt_token_ids])
        found = [self._patches(part) for part in asked.parts if not isinstance(part, tuple)]
        inputs: dict[str, Any] = {}
        if found:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([patches for patches, _ in found]))
            inputs["image_grid_thw"] = torch.tensor([grid for _, grid in found])
            inputs["mm_token_type_ids"] = (prompt == PAD).int()
        model: Any = self.zoo._reference
        if asked.adapter is not None:
            model.set_adapter(asked.adapter)
        with model.disable_adapter() if asked.adapter is None else nullcontext():
            made = model.generate(
                input_ids=prompt,
                **inputs,
                max_new_tokens=asked.output,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answer: list[int] = made[0, prompt.shape[1] :].tolist()
        return answer

    def _patches(self, image: Image.Image, **options: bool) -> tuple[np.ndarray, tuple[int, int, int]]:
        made = self._processor(image, return_tensors="np", **options)
        time, height, width = (int(side) for side in made["image_grid_thw"][0])
        return made["pixel_values"], (time, height, width)
