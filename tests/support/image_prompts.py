"""Prompts with images for tiny models of text and images: as the engine gets them, and transformers' answers."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapter_zoo import Asked, Zoo, run, to_request
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from loramux.engine.engine import Engine
from loramux.engine.execution.checkpoint import read_config
from loramux.engine.messages import ImageInput, Request, ServiceClass
from loramux_adapters.families import ImageForm, family_of, images_of

PAD, START, END = 90, 92, 93
"""Tokens of `adapter_zoo.with_images`: the placeholder, and the marks around an image's placeholders."""
AFTER_LINE, AT_END = 94, 95
"""Tokens after a line of placeholders, and after the last line."""
MERGE = 2


def save_processor(base: Path) -> None:
    """Save the processor of small images into a base's folder: of at most 1,024 pixels, or 16 pixels a side."""
    config = read_config(base)
    form, patch = images_of(config.model_type), config.vision_config.patch_size
    assert form is not None
    if form.tower_reads == "patches":
        size = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=patch, merge_size=MERGE, size=size).save_pretrained(base)
    elif form.tower_reads == "a square":
        Gemma3ImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(base)
    elif form.tower_reads == "placed patches":
        Gemma4ImageProcessorPil(patch_size=patch, max_soft_tokens=70).save_pretrained(base)
    else:
        cell = {"height": patch * MERGE, "width": patch * MERGE}
        PixtralImageProcessorPil(patch_size=cell, size={"longest_edge": 16}).save_pretrained(base)
        (base / "processor_config.json").write_text(json.dumps({"patch_size": patch, "spatial_merge_size": MERGE}))


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


TEXT = {"target_modules": r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"}
RECIPES = {"plain": TEXT | {"r": 8, "lora_alpha": 16}, "wide": TEXT | {"r": 20, "lora_alpha": 6, "use_rslora": True}}


class ImageZoo:
    """A `Zoo` of a model of text and images whose prompts have images."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        config = read_config(zoo.base)
        form = images_of(config.model_type)
        assert form is not None
        self.form: ImageForm = form
        self.merge = 3 if form.tower_reads == "placed patches" else MERGE
        self.keeps_states = family_of(config).states is not None
        self._patch = int(config.vision_config.patch_size)
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
            data, grid = self._bytes(part)
            lines, columns = grid[1] // self.merge, grid[2] // self.merge
            digest = hashlib.sha256(repr(grid).encode() + data).hexdigest()
            line = [*[PAD] * columns, *[AFTER_LINE] * self.form.breaks_lines]
            own = line * lines
            if self.form.breaks_lines:
                own[-1] = AT_END
            image = ImageInput(
                digest=digest,
                patches=data,
                grid=grid,
                start=len(tokens) + 1,
                num_tokens=len(own),
                num_lines=lines if self.form.breaks_lines else 0,
            )
            images.append(image)
            tokens += [START, *own, END]
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
        inputs = self.pixels_of(asked)
        inputs.pop("num_crops", None)
        inputs.pop("num_soft_tokens_per_image", None)
        if inputs and (self.form.has_places or self.form.sees_ahead != "nowhere"):
            name = "token_type_ids" if self.form.tower_reads == "a square" else "mm_token_type_ids"
            inputs[name] = (prompt == PAD).int()
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

    def pixels_of(self, asked: Pictured) -> dict[str, Any]:
        """Return what transformers' model gets of the request's images."""
        found = [part for part in asked.parts if not isinstance(part, tuple)]
        return dict(self._processor(found, return_tensors="pt")) if found else {}

    def _bytes(self, image: Image.Image) -> tuple[bytes, tuple[int, int, int]]:
        """Return an image as the engine gets it, and its grid."""
        made = self._processor(image, return_tensors="np", do_rescale=False, do_normalize=False)
        if self.form.tower_reads == "placed patches":
            places = made["image_position_ids"][0]
            places = places[places[:, 0] >= 0]
            width, height = (int(side) + 1 for side in places.max(axis=0))
            return made["pixel_values"][0, : len(places)].astype(np.uint8).tobytes(), (1, height, width)
        data = made["pixel_values"].astype(np.uint8).tobytes()
        if self.form.tower_reads == "a square":
            height, width = (side // self._patch for side in made["pixel_values"].shape[-2:])
            return data, (1, height, width)
        if self.form.tower_reads == "patches":
            time, height, width = (int(side) for side in made["image_grid_thw"][0])
            return data, (time, height, width)
        height, width = (int(side) // self._patch for side in made["image_sizes"][0])
        return data, (1, height, width)


def serve(zoo: ImageZoo, engine: Engine, asked: list[Any], arrivals: list[int] | None = None) -> dict[str, list[int]]:
    """Run the requests to their ends; see `run`."""
    return run(engine, [zoo.request(one) for one in asked], arrivals)


def mixed_prompts(count: int) -> list[Pictured | Asked]:
    """Return requests of the base and two adapters, with none to three images of mixed sizes."""
    sizes = ((8, 8), (40, 12), (17, 33), (24, 24), (9, 60), (30, 20))
    names = (None, *RECIPES)
    asked: list[Pictured | Asked] = []
    for i in range(count):
        name, adapter, text = f"r{i}", names[i % 3], tuple(range(3 + i, 9 + 2 * i))
        if i % 4 == 3:
            asked.append(Asked(name, adapter, text, 7))
            continue
        images = [picture(10 * i + k, *sizes[(i + k) % len(sizes)]) for k in range(1 + i % 3)]
        parts: list[Any] = [text]
        for k, image in enumerate(images):
            parts += [image, (20 + k, 21 + i)]
        asked.append(Pictured(name, adapter, tuple(parts), 7))
    return asked
