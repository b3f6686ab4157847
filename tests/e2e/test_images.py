"""Images over HTTP: the server answers as transformers' own processor and model, with an adapter and without."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import peft
import pytest
import torch
import transformers
from image_base import CONFIGS, make_model_base, picture, saved
from live_folders import holding
from PIL import Image
from server_process import Child, Place, served

TOKENS = 12
SIZES = ((56, 28), (33, 80), (120, 40), (64, 64))


@pytest.fixture(
    scope="module",
    params=["patches", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "patches")],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_base(tmp_path_factory.mktemp("base"), request.param)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    targets = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
        wrapped.save_pretrained(folder)
    return folder


class Running(NamedTuple):
    child: Child
    place: Place
    keys: dict[str, str]
    """Keys of the tenants; nothing of `secret` may be stored."""


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = Place(tmp_path_factory.mktemp("place"), base).prepare()
    named = 'served_model_name = "tiny"\n'
    place.config.write_text(place.config.read_text().replace(named, f'{named}dtype = "float32"\n'))
    place.loramux("migrate")
    keys = {name: place.key_of(name) for name in ("acme", "secret")}
    assert place.loramux("tenant", "zero-retention", "secret")["zero_retention"] is True
    with served(place) as child:
        yield Running(child, place, keys)


def content_of(images: list[Image.Image]) -> list[Any]:
    parts: list[Any] = [{"type": "text", "text": "what?"}]
    for image in images:
        url = f"data:image/png;base64,{base64.b64encode(saved(image)).decode()}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "and"}]
    return parts


class Reference:
    """transformers' processor and model, with an adapter or without."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(base, backend="pil")
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(base)
        if adapter is not None:
            self.model = peft.PeftModel.from_pretrained(self.model, adapter)

    @torch.no_grad()
    def answer(self, images: list[Image.Image]) -> list[int]:
        """The tokens of a greedy answer."""
        parts: list[Any] = [{"type": "text", "text": "what?"}]
        for _ in images:
            parts += [{"type": "image"}, {"type": "text", "text": "and"}]
        messages = [{"role": "user", "content": parts}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0].tolist()
        inputs = {}
        if self.model.config.model_type == "mistral3":
            pixels = self.processor(images, return_tensors="pt", patch_size={"height": 8, "width": 8})
            shown = [placeholders(*(int(side) // 8 for side in size)) for size in pixels["image_sizes"]]
        elif (marked := self.model.config.model_type) in ("gemma3", "gemma4"):
            pixels = self.processor(images, return_tensors="pt")
            counts = pixels.pop("num_soft_tokens_per_image", [9] * len(images))
            pixels.pop("num_crops", None)
            space = list(b"\n\n") if marked == "gemma3" else []
            shown = [[*space, 258, *[260] * int(count), 259, *space] for count in counts]
            if marked == "gemma3":  # its template has the mark for the image
                ids = [260 if one == 258 else one for one in ids]
        else:
            pixels = self.processor(images, return_tensors="pt")
            shown = [[260] * (int(grid.prod()) // 4) for grid in pixels["image_grid_thw"]]
        placed = torch.tensor([[token for one in ids for token in (shown.pop(0) if one == 260 else [one])]])
        if self.model.config.model_type != "mistral3":
            kinds = "token_type_ids" if self.model.config.model_type == "gemma3" else "mm_token_type_ids"
            inputs[kinds] = (placed == 260).int()
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made = self.model.generate(input_ids=placed, **inputs, **pixels, **options)
        return made[0, placed.shape[1] :].tolist()


def placeholders(lines: int, columns: int) -> list[int]:
    """The tokens of a picture."""
    return [*([*[260] * columns, 258] * lines)[:-1], 259]


def answered(client: openai.OpenAI, model: str, images: list[Image.Image]) -> tuple[list[int], Any]:
    """Return the tokens and the usage of an answer, which is streamed if there are two images."""
    body = {"return_token_ids": True, "ignore_eos": True}
    messages: Any = [{"role": "user", "content": content_of(images)}]
    asked: Any = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "extra_body": body}
    if len(images) != 2:
        made: Any = client.chat.completions.create(**asked)
        return made.choices[0].token_ids, made.usage
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    parts: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [token for part in parts for token in getattr(part, "token_ids", None) or ()]
    return tokens, chunks[-1].usage


def test_answers_to_images_are_transformers_for_the_base_and_an_adapter(
    server: Running, base: Path, adapter: Path
) -> None:
    child, key = server.child, server.keys["acme"]
    with child.http(key) as http:
        files = [("files", (path.name, path.read_bytes())) for path in adapter.iterdir() if path.suffix != ".md"]
        made = http.post("/v1/adapters", data={"name": "eyes"}, files=files)
        assert made.status_code == 201, made.text
    client = child.openai(key)
    prompts = [[picture(*SIZES[(i + k) % 4], seed=10 * i + k) for k in range(1 + i % 3)] for i in range(6)]
    for model, reference in (("tiny", Reference(base, None)), ("eyes", Reference(base, adapter))):
        for images in prompts:
            tokens, usage = answered(client, model, images)
            assert tokens == reference.answer(images), (model, [image.size for image in images])
            assert usage.prompt_tokens > 0


def test_adapter_of_the_vision_tower_is_uploaded_and_answers_as_peft(
    server: Running, base: Path, tmp_path: Path
) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(base)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = peft.LoraConfig(r=6, lora_alpha=9, init_lora_weights=False, target_modules="all-linear", use_dora=True)
        peft.get_peft_model(model, config).save_pretrained(tmp_path)
    child, key = server.child, server.keys["acme"]
    with child.http(key) as http:
        files = [("files", (path.name, path.read_bytes())) for path in tmp_path.iterdir() if path.suffix != ".md"]
        made = http.post("/v1/adapters", data={"name": "tower"}, files=files)
        assert made.status_code == 201, made.text
    client, images = child.openai(key), [picture(33, 80, seed=3), picture(64, 64, seed=4)]
    wanted = {name: Reference(base, folder).answer(images) for name, folder in (("tiny", None), ("tower", tmp_path))}
    assert wanted["tiny"] != wanted["tower"]
    assert {name: answered(client, name, images)[0] for name in wanted} == wanted


SECRET = saved(picture(64, 64, seed=77))
MARKS = (SECRET[300:348], base64.b64encode(SECRET)[400:464])
"""Parts of an image's file, as it is and as base64."""


def marked(folder: Path) -> list[str]:
    """List the files under `folder`, the server's log among them, that hold a part of the image."""
    return [str(path.relative_to(folder)) for mark in MARKS for path in holding(folder, mark)]


@pytest.mark.parametrize("tenant", ["acme", "secret"])
def test_images_are_nowhere_on_the_disk(server: Running, tenant: str) -> None:
    client, folder = server.child.openai(server.keys[tenant]), server.place.folder
    url = f"data:image/png;base64,{base64.b64encode(SECRET).decode()}"
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    client.chat.completions.create(**asked)
    list(client.chat.completions.create(**asked, stream=True))
    stream = client.chat.completions.create(**(asked | {"max_tokens": 300}), stream=True)
    next(iter(stream))
    stream.close()
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    client.responses.create(model="tiny", input=items, store=False, max_output_tokens=4)
    part["image_url"]["url"] = url[:-200]  # cut off
    with pytest.raises(openai.BadRequestError, match="damaged or cut off"):
        client.chat.completions.create(**asked)
    assert marked(folder) == []
    if tenant == "secret":
        with pytest.raises(openai.PermissionDeniedError):
            client.files.create(file=("a.png", SECRET), purpose="vision")
        assert marked(folder) == []
        return
    file = client.files.create(file=("a.png", SECRET), purpose="vision")
    assert marked(folder) == [f"var/blobs/files/{file.id}"], "the search finds what is stored"
    by_id: Any = {"type": "image_file", "image_file": {"file_id": file.id}}
    client.chat.completions.create(**(asked | {"messages": [{"role": "user", "content": [by_id]}]}))
    client.files.delete(file.id)
    assert marked(folder) == []
