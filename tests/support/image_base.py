"""The files of a base that reads images: a byte tokenizer, a template, and Qwen2-VL's image processor."""

from __future__ import annotations

import atexit
import io
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tiny_base import byte_tokenizer, make_base
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from loramux.serving.images import ImageFormat
from loramux.serving.tokenizer import Tokenizer
from loramux_adapters.families import TowerInput

PAD = "<|image_pad|>"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
"""The text of an image in the template."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    f"{{% for part in m['content'] %}}{{% if part['type'] == 'image' %}}{SHOWN}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATES: Mapping[TowerInput, str] = {
    "patches": CHAT_TEMPLATE,
    "a picture": CHAT_TEMPLATE,
    "a square": CHAT_TEMPLATE.replace(SHOWN, "<|vision_start|>"),
    "placed patches": CHAT_TEMPLATE.replace(SHOWN, PAD),
}
IMAGE_TOKEN_ID = 260
VOCABULARY = 261


def image_tokenizer(chat_template: str = CHAT_TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """The byte tokenizer; 258 and 259 are around an image, and 260 is its pad token."""
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", PAD]})
    assert tokenizer.convert_tokens_to_ids(PAD) == IMAGE_TOKEN_ID
    return tokenizer


def make_image_files(folder: Path, patch_size: int = 14) -> Path:
    """Write the files that describe images, next to a checkpoint's other files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen2_vl", "image_token_id": IMAGE_TOKEN_ID}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 1003520},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def make_image_base(folder: Path) -> Path:
    """Write a base for a scripted engine, which never reads its weights; return the folder."""
    make_base(folder, CHAT_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    make_image_files(folder)
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": IMAGE_TOKEN_ID}))
    image_tokenizer().save_pretrained(folder)
    return folder


def make_picture_files(folder: Path, patch_size: int = 14, longest_edge: int = 1540) -> Path:
    """Write the files that describe images whose tower reads pictures; 258 is after a line, and 259 after the last."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").is_file():
        (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "image_token_index": IMAGE_TOKEN_ID}))
    size = {"longest_edge": longest_edge}
    cell = {"height": patch_size, "width": patch_size}
    PixtralImageProcessorPil(patch_size=cell, size=size).save_pretrained(folder)
    tokens = {"image_token": PAD, "image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>"}
    facts = {"processor_class": "PixtralProcessor", "patch_size": patch_size, "spatial_merge_size": 2}
    (folder / "processor_config.json").write_text(json.dumps(facts | tokens))
    return folder


def make_marked_files(folder: Path, reads: TowerInput) -> Path:
    """Write the files that describe images between the marks 258 and 259: squares of 9 tokens, or placed patches."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {"image_token_id": IMAGE_TOKEN_ID, "boi_token_id": 258, "eoi_token_id": 259}
    processor: Any
    if reads == "a square":
        vision = {"image_size": 24, "patch_size": 4}
        config = transformers.Gemma3Config(vision_config=vision, mm_tokens_per_image=9, **tokens)
        processor = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    else:
        config = transformers.Gemma4Config(vision_config={"patch_size": 4}, **tokens)
        processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=140)
    if not (folder / "config.json").is_file():
        config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@cache
def image_format(reads: TowerInput = "patches") -> ImageFormat:
    """The form of images of such a base, whose process starts once in a run of tests."""
    folder = Path(tempfile.mkdtemp())
    if reads == "patches":
        make_image_files(folder)
    elif reads == "a picture":
        make_picture_files(folder)
    else:
        make_marked_files(folder, reads)
    found = ImageFormat.load(folder, Tokenizer(image_tokenizer()))
    assert found is not None
    atexit.register(shutil.rmtree, folder)
    atexit.register(found.close)
    return found


def picture(width: int = 56, height: int = 28, seed: int = 0) -> Image.Image:
    """A picture of random colours."""
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
