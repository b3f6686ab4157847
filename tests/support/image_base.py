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
from typing import Any, cast

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_base import byte_tokenizer, make_base
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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


TEXT = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 256,
}
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
MARKS = {"image_token_id": 260, "boi_token_id": 258, "eoi_token_id": 259}
CONFIGS = {
    "patches": transformers.Qwen2_5_VLConfig(
        text_config=TEXT | M_ROPE,
        vision_config=VISION
        | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "window_size": 24, "fullatt_block_indexes": [1]},
        image_token_id=260,
        vision_start_token_id=258,
        vision_end_token_id=259,
    ),
    "states": transformers.Qwen3_5Config(
        text_config=TEXT
        | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 20}
        | {"rope_parameters": M_ROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        vision_config=VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
        image_token_id=260,
        vision_start_token_id=258,
        vision_end_token_id=259,
    ),
    "a picture": transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral", "num_hidden_layers": 2, "num_attention_heads": 2},
        image_token_index=260,
    ),
    "a square": transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
        vision_config=VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24},
        mm_tokens_per_image=9,
        **MARKS,
    ),
    "placed patches": transformers.Gemma4Config(
        text_config=TEXT
        | {"head_dim": 16, "global_head_dim": 16, "sliding_window": 20, "use_bidirectional_attention": "vision"}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 261}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        vision_config=VISION
        | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        audio_config=None,
        **MARKS,
    ),
}
"""Bases by what is special of their images."""


def make_model_base(folder: Path, name: str) -> Path:
    """Write a whole small base of `CONFIGS`, with random weights; return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForImageTextToText.from_config(CONFIGS[name]).save_pretrained(folder)
    if name == "a picture":
        make_picture_files(folder, patch_size=4, longest_edge=64)
    elif name in ("a square", "placed patches"):
        make_marked_files(folder, cast(TowerInput, name))
    else:
        size = {"shortest_edge": 64, "longest_edge": 2048}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    template = next((TEMPLATES[reads] for reads in TEMPLATES if reads == name), CHAT_TEMPLATE)
    image_tokenizer(template).save_pretrained(folder)
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
