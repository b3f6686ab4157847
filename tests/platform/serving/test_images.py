"""Images of prompts: what reaches the engine, and what is refused before it is decoded."""

from __future__ import annotations

import base64
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import numpy as np
import pytest
from gateway_harness import Harness, in_harness, read
from image_base import IMAGE_TOKEN_ID, PAD, TEMPLATES, image_tokenizer, make_image_files, picture, saved
from PIL import Image
from scripted_engine import FACTS
from transformers import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from loramux.common.public_http import PublicTransport, Resolver
from loramux.common.sandbox.sandbox import JobEnded, JobKilled, JobOutOfMemory, Sandbox, SandboxError
from loramux.common.settings.serving import ImageSettings
from loramux.engine.messages import ImageInput, SamplingParams
from loramux.serving.errors import InvalidRequest, PromptTooLong, ServingError, Unavailable
from loramux.serving.image_decoding import DecodingSetup
from loramux.serving.images import TooManyImages
from loramux.serving.messages import ChatOptions, ImageSource, Message, PlacedImage, Truncation
from loramux_adapters.families import TowerInput

SETTINGS = ImageSettings(max_per_request=4, max_bytes=1 << 20, max_pixels=4_000_000, max_tokens=64)
WHERE = "messages[0].content[1]"


def source(file: bytes | str, **fields: Any) -> ImageSource:
    data = file if isinstance(file, str) else base64.b64encode(file).decode()
    return ImageSource(**{"kind": "data", "value": data, "where": WHERE, "type": "image_url"} | fields)


def turn(text: str, *images: tuple[int, ImageSource], role: str = "user", **fields: Any) -> Message:
    return Message(role, text, fields, 0, tuple(PlacedImage(*image) for image in images))


def chat(*turns: Message, **changes: Any) -> dict[str, Any]:
    return {"kind": "chatcmpl-", "prompts": (turns,), "max_tokens": 4} | changes


def expected(image: Image.Image, max_tokens: int = 64) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the pixel values of transformers' own processor, and the grid."""
    size = {"shortest_edge": 3136, "longest_edge": max_tokens * 28 * 28}
    made = Qwen2VLImageProcessorPil(size=size)(images=[image])
    return made["pixel_values"], tuple(made["image_grid_thw"][0])


def pixel_values(image: ImageInput) -> np.ndarray:
    """Return an image's patches as the engine scales and normalises them."""
    processor = Qwen2VLImageProcessorPil()
    mean, std = (np.repeat(values, 2 * 14 * 14) for values in (processor.image_mean, processor.image_std))
    patches = np.frombuffer(image.patches, np.uint8).reshape(-1, 3 * 2 * 14 * 14)
    return (patches / 255 - mean) / std


def in_images(test: Callable[[Harness], Any], folder: Path, settings: ImageSettings = SETTINGS, **engine: Any) -> None:
    in_harness(test, folder, images=settings, **engine)


def test_images_reach_the_engine_as_transformers_cuts_them_in_the_order_of_the_prompt(tmp_path: Path) -> None:
    first, second = picture(56, 84, 1), picture(300, 200, 2)
    turns = (
        turn("look: and", (5, source(saved(first)))),
        turn("seen", role="assistant"),
        turn("", (0, source(saved(second, "WEBP", lossless=True))), (0, source(saved(first)))),
    )

    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(*turns)))
        (request,) = made.engine.requests
        assert [image.num_tokens for image in request.images] == [6, 54, 6]
        for image, given in zip(request.images, (first, second, first), strict=True):
            values, grid = expected(given)
            assert image.grid == grid
            np.testing.assert_allclose(pixel_values(image), values, atol=1e-5)
            end = image.start + image.num_tokens
            assert request.prompt_token_ids[image.start - 1 : end + 1] == [
                258,
                *[IMAGE_TOKEN_ID] * (end - image.start),
                259,
            ]
        assert request.images[0].digest == request.images[2].digest != request.images[1].digest
        text = bytes(token for token in request.prompt_token_ids if token < 256).decode()
        assert text == "user: look: and\nassistant: seen\nuser: \nassistant:"
        assert request.prompt_token_ids[: request.images[0].start - 1] == list(b"user: look:")
        (entry,) = await made.entries()
        assert entry[1] == len(request.prompt_token_ids) > 72

    in_images(test, tmp_path)


PICTURE_SIZES = ((56, 84), (1000, 300), (33, 29), (17, 900), (1400, 1300), (28, 28))


def test_pictures_reach_the_engine_as_transformers_resizes_them_with_a_token_after_each_line(tmp_path: Path) -> None:
    pictures = [picture(*size, seed) for seed, size in enumerate(PICTURE_SIZES)]
    processor = PixtralImageProcessorPil(size={"longest_edge": 1540}, do_rescale=False, do_normalize=False)

    async def test(made: Harness) -> None:
        parts = [(0, source(saved(one))) for one in pictures]
        await read(await made.begin(**chat(turn("a", *parts), max_tokens=1)))
        (request,) = made.engine.requests
        for image, given in zip(request.images, pictures, strict=True):
            lines, columns = image.grid[1] // 2, image.grid[2] // 2
            shown = processor([given], patch_size={"height": 28, "width": 28}, return_tensors="np")
            np.testing.assert_equal(shown["image_sizes"][0], (lines * 28, columns * 28))
            assert image.patches == shown["pixel_values"].astype(np.uint8).tobytes()
            own = request.prompt_token_ids[image.start : image.start + image.num_tokens]
            line = [*[IMAGE_TOKEN_ID] * columns, 258]
            assert own == [*(line * lines)[:-1], 259]
            assert (image.num_lines, image.num_placeholders) == (lines, lines * columns)

    in_images(test, tmp_path, ImageSettings(), tower_reads="a picture")


@pytest.mark.parametrize("size", [(1400, 1400), (3000, 200), (200, 1999), (56, 29)])
def test_a_picture_is_resized_to_the_most_tokens(tmp_path: Path, size: tuple[int, int]) -> None:
    """The result is what the processor makes with a lower bound for edges, and not much smaller than allowed."""
    given = Image.new("RGB", size, "red")

    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(turn("a", (0, source(saved(given)))))))
        (image,) = made.engine.requests[0].images
        lines, columns = image.grid[1] // 2, image.grid[2] // 2
        assert image.num_tokens == lines * (columns + 1) <= 64
        assert (lines + 1) * (columns + 2) > 64 or size == (56, 29)
        edge = 28 * max(lines, columns)
        processor = PixtralImageProcessorPil(size={"longest_edge": edge}, patch_size={"height": 28, "width": 28})
        assert tuple(processor([given])["image_sizes"][0]) == (28 * lines, 28 * columns)

    in_images(test, tmp_path, tower_reads="a picture")


def test_a_picture_without_a_line_is_refused(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match="more than 200 times"):
            await made.begin(**chat(turn("a", (0, source(saved(picture(3000, 1)))))))

    in_images(test, tmp_path, tower_reads="a picture")


def shown(processor: Any, image: Image.Image) -> tuple[np.ndarray, int, int]:
    """Return the values of transformers' own processor of placed patches without the padding, lines and columns."""
    made = processor([image], return_tensors="np", do_rescale=False)
    places = made["image_position_ids"][0]
    kept = places[:, 0] >= 0
    columns, lines = places[kept].max(axis=0) + 1
    return made["pixel_values"][0][kept], int(lines), int(columns)


def tokens_of_gemma_3(pictures: list[Image.Image]) -> list[int]:
    """Return the tokens of transformers' own processor for "a", pictures, and "b"."""
    tokenizer: Any = image_tokenizer(TEMPLATES["a square"])
    for name, text in {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": PAD}.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(), tokenizer, chat_template=tokenizer.chat_template, image_seq_length=9
    )
    shown = [{"type": "image", "image": one} for one in pictures]
    content = [{"type": "text", "text": "a"}, *shown, {"type": "text", "text": "b"}]
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    made: Any = processor.apply_chat_template([{"role": "user", "content": content}], **options)
    return list(made["input_ids"][0][1:])  # this template writes no first token


def test_squares_reach_the_engine_as_transformers_resizes_them_with_empty_lines_around_their_marks(
    tmp_path: Path,
) -> None:
    pictures = [picture(*size, seed) for seed, size in enumerate(PICTURE_SIZES[:4])]
    processor = Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, do_rescale=False, do_normalize=False)

    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(turn("ab", *((1, source(saved(one))) for one in pictures)))))
        (request,) = made.engine.requests
        own = [*b"\n\n", 258, *[IMAGE_TOKEN_ID] * 9, 259, *b"\n\n"]
        assert request.prompt_token_ids == [*b"user: a", *own * 4, *b"b\nassistant:"]
        assert request.prompt_token_ids == tokens_of_gemma_3(pictures)
        for image, given in zip(request.images, pictures, strict=True):
            assert image.patches == processor([given], return_tensors="np")["pixel_values"].astype(np.uint8).tobytes()
            assert (image.grid, image.num_tokens) == ((1, 6, 6), 9)
            assert request.prompt_token_ids[image.start - 1] == 258

    in_images(test, tmp_path, tower_reads="a square")


def test_placed_patches_reach_the_engine_as_transformers_cuts_them_within_the_bound_of_the_request(
    tmp_path: Path,
) -> None:
    """`detail` and the operator's bound choose among the processor's own maxima."""
    given = [picture(*size, seed) for seed, size in enumerate(PICTURE_SIZES[:4])]
    parts = [(0, source(saved(one))) for one in given]
    most = {140: 1000, 70: 139}

    async def test(made: Harness, count: int) -> None:
        processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=count)
        await read(await made.begin(**chat(turn("", *parts))))
        (request,) = made.engine.requests
        for image, one in zip(request.images, given, strict=True):
            values, lines, columns = shown(processor, one)
            assert (image.grid, image.num_tokens) == ((1, lines, columns), lines * columns // 9)
            assert image.patches == values.astype(np.uint8).tobytes()
            own = request.prompt_token_ids[image.start - 1 : image.start + image.num_tokens + 1]
            assert own == [258, *[IMAGE_TOKEN_ID] * image.num_tokens, 259]

    for count, bound in most.items():
        (tmp_path / str(count)).mkdir()
        settings = ImageSettings(max_pixels=4_000_000, max_tokens=bound)
        in_images(partial(test, count=count), tmp_path / str(count), settings, tower_reads="placed patches")


@pytest.mark.parametrize(("reads", "bound"), [("a square", 8), ("placed patches", 69)])
def test_images_of_more_tokens_than_allowed_that_cannot_be_smaller_are_refused_with_the_setting(
    tmp_path: Path, reads: TowerInput, bound: int
) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match=rf"more tokens than {bound}, the most \(images.max_tokens\)"):
            await made.begin(**chat(turn("a", (0, source(saved(picture()))))))

    in_images(test, tmp_path, ImageSettings(max_tokens=bound), tower_reads=reads)


def test_text_that_spells_the_mark_of_an_image_is_refused_next_to_an_image(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match="marks the place of an image"):
            await made.begin(**chat(turn("a<|vision_start|>", (0, source(saved(picture()))))))
        await read(await made.begin(**chat(turn("a<|vision_start|>"))))

    in_images(test, tmp_path, tower_reads="a square")


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG of one colour, which may be large: rows of zeros compress well."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = zlib.compress(bytes((width // 8 + 1) * min(height, 1000)), 9)
    body = b"".join(chunk(*one) for one in (*chunks, (b"IDAT", rows), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + header + body


def animation(form: str, frames: int) -> bytes:
    rest = [Image.new("L", (2, 2), number * 80 % 256) for number in range(1, frames)]
    return saved(Image.new("L", (2, 2)), form, save_all=True, append_images=rest)


def scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    data = saved(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


HOSTILE: dict[str, tuple[Callable[[], bytes | str], str]] = {
    "50,000 x 50,000 pixels": (lambda: png(50_000, 50_000), "50000 x 50000 pixels, and the most is 4000000"),
    "too many bytes": (lambda: saved(picture(700, 700)), "more than 1048576 bytes"),
    "gif of 10,000 frames": (lambda: animation("GIF", 10_000), "animated"),
    "jpeg of 2,000 scans": (lambda: scans(2000), "too many scans"),
    "animated png": (lambda: animation("PNG", 3), "animated"),
    "animated webp": (lambda: animation("WEBP", 3), "animated"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "none of PNG, JPEG, WEBP, GIF"),
    "bmp": (lambda: saved(picture(), "BMP"), "none of PNG"),
    "empty": (lambda: b"", "none of PNG"),
    "no base64": (lambda: "abc", "no base64"),
    "truncated jpeg": (lambda: saved(picture(640, 480), "JPEG")[:4000], "damaged or cut off"),
    "truncated png": (lambda: saved(picture(640, 480))[:4000], "damaged or cut off"),
    "png of text": (lambda: png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20), 9))), "damaged or cut off"),
    "too narrow": (lambda: saved(picture(1000, 4)), "more than 200 times"),
}


def test_hostile_files_are_refused_by_their_field_and_in_bounded_time(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(turn("a", (0, source(saved(picture())))))))  # the process has started
        for name, (make, reason) in HOSTILE.items():
            file, began = make(), time.monotonic()
            with pytest.raises(InvalidRequest, match=reason) as refusal:
                await made.begin(**chat(turn("a", (0, source(file)))))
            assert refusal.value.field == WHERE, name
            assert WHERE in str(refusal.value), name
            assert time.monotonic() - began < 30, name
        assert len(made.engine.requests) == 1

    in_images(test, tmp_path)


def test_unusual_files_are_shown_as_people_see_them(tmp_path: Path) -> None:
    plain = picture(112, 56, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    alpha = plain.convert("RGBA")
    alpha.putalpha(0)
    deep = Image.fromarray(np.full((56, 112), 0x8000, np.uint16))
    two = saved(plain, "MPO", save_all=True, append_images=[picture(112, 56, 4)], quality=100)
    cases: dict[str, tuple[bytes, Image.Image]] = {
        "turned": (saved(plain, exif=exif), plain.transpose(Image.Transpose.ROTATE_270)),
        "transparent": (saved(alpha), Image.new("RGB", plain.size, "white")),
        "palette": (saved(plain.quantize(8)), plain.quantize(8).convert("RGB")),
        "grey": (saved(plain.convert("L")), plain.convert("L").convert("RGB")),
        "16 bits": (saved(deep), Image.new("RGB", plain.size, (128, 128, 128))),
        "cmyk": (
            saved(Image.new("CMYK", plain.size, (0, 255, 255, 0)), "JPEG"),
            Image.new("RGB", plain.size, (255, 0, 0)),
        ),
        "two pictures of a camera": (two, Image.open(__import__("io").BytesIO(two)).convert("RGB")),
        "gif of one frame": (saved(plain.quantize(8), "GIF"), plain.quantize(8).convert("RGB")),
    }

    async def test(made: Harness) -> None:
        for name, (file, shown) in cases.items():
            await read(await made.begin(**chat(turn("a", (0, source(file))))))
            (image,) = made.engine.requests[-1].images
            values, grid = expected(shown)
            assert image.grid == grid, name
            np.testing.assert_allclose(pixel_values(image), values, atol=0.02, err_msg=name)

    in_images(test, tmp_path)


def test_a_large_image_is_resized_to_the_most_tokens_and_with_low_detail_to_256(tmp_path: Path) -> None:
    large = saved(Image.new("RGB", (1400, 1400), "red"))

    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(turn("a", (0, source(large)), (1, source(large, is_small=True))))))
        assert [image.num_tokens for image in made.engine.requests[0].images] == [1024, 256]

    in_images(test, tmp_path, ImageSettings(max_tokens=1024))


SPELLED = f"see {PAD}"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (chat(turn(SPELLED, (0, source(saved(picture()))))), "messages"),
        (chat(turn("a", (0, source(saved(picture())))), turn(SPELLED, role="assistant")), "messages"),
        (chat(turn("a", (0, source(saved(picture()))), note=[SPELLED])), "messages"),
        (chat(turn("a", (0, source(saved(picture())))), chat=ChatOptions(template={"tools": [SPELLED]})), "messages"),
        (chat(turn(SPELLED)), "messages"),
        ({"prompts": (SPELLED,)}, "prompt"),
        ({"prompts": ([1, IMAGE_TOKEN_ID, 2],)}, "prompt"),
    ],
)
def test_a_text_that_spells_the_pad_token_is_refused(tmp_path: Path, asked: dict[str, Any], field: str) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match="marks the place of an image") as refusal:
            await made.begin(**asked)
        assert refusal.value.field == field

    in_images(test, tmp_path)


def test_images_count_in_the_context_and_a_truncation_cuts_none(tmp_path: Path) -> None:
    image = source(saved(picture(280, 140, 5)))  # 50 tokens

    async def test(made: Harness) -> None:
        with pytest.raises(PromptTooLong) as refusal:
            await made.begin(**chat(turn("a", (0, image))))
        assert refusal.value.tokens == 70
        text = "x" * 20
        await read(await made.begin(**chat(turn(text, (0, image)), truncation=Truncation(30), max_tokens=1)))
        assert not made.engine.requests[0].images
        await read(await made.begin(**chat(turn(text, (20, image)), truncation=Truncation(63), max_tokens=1)))
        (placed,) = made.engine.requests[1].images
        assert made.engine.requests[1].prompt_token_ids[placed.start : placed.start + 50] == [IMAGE_TOKEN_ID] * 50
        with pytest.raises(InvalidRequest, match="would cut an image"):
            await made.begin(**chat(turn(text, (0, image)), truncation=Truncation(60)))

    in_images(test, tmp_path, facts=msgspec.structs.replace(FACTS, vocab_size=261, max_model_len=64))


def test_a_base_without_images_refuses_them_by_its_name(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        with pytest.raises(
            InvalidRequest, match=r"'image_url', and this model reads text only: its base is 'tiny'"
        ) as no:
            await made.begin(**chat(turn("a", (0, source(saved(picture()))))))
        assert (no.value.field, no.value.code) == (WHERE, "unsupported_parameter")

    in_harness(test, tmp_path)


def test_images_are_bounded_in_number_and_in_bytes(tmp_path: Path) -> None:
    image = source(saved(picture()))

    async def test(made: Harness) -> None:
        with pytest.raises(InvalidRequest, match="5 images, and the most is 4"):
            await made.begin(**chat(turn("a", *[(0, image)] * 5)))
        with pytest.raises(InvalidRequest, match="more than 20000 bytes together"):
            await made.begin(**chat(turn("a", *[(0, source(saved(picture(56, 56))))] * 4)))

    in_images(test, tmp_path, ImageSettings(max_per_request=4, max_request_bytes=20_000))


def test_a_tenants_running_images_are_bounded_and_their_memory_returns_with_the_answer(tmp_path: Path) -> None:
    large = source(saved(Image.new("RGB", (1008, 1008), "red")))  # 1,296 tokens, 5.8 MiB

    async def test(made: Harness) -> None:
        asked = chat(turn("a", (0, large)), sampling=SamplingParams(max_tokens=0))
        running = [await made.begin(**asked), await made.begin(**asked)]
        with pytest.raises(TooManyImages):
            await made.begin(**asked)
        with pytest.raises(InvalidRequest, match="too large for 3 choices"):
            await made.begin(**asked, n=3)
        made.engine.pause = 0.0
        for request, one in zip(made.engine.requests, running, strict=True):
            made.engine.left[request.id].set()  # ends the pause
            await read(one)
            await one.task  # type: ignore[attr-defined]
        await read(await made.begin(**asked))

    in_images(test, tmp_path, ImageSettings(memory_bytes=64 << 20), pause=1_000.0)


def test_every_choice_gets_the_images(tmp_path: Path) -> None:
    async def test(made: Harness) -> None:
        await read(await made.begin(**chat(turn("a", (0, source(saved(picture())))), n=3)))
        assert len({request.images for request in made.engine.requests}) == 1
        assert len(made.engine.requests) == 3

    in_images(test, tmp_path)


def test_the_decoding_process_starts_without_torch_and_says_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from loramux.serving.image_decoding import prepare; prepare(sys.stdin.buffer.read())\n"
        "print([name for name in ('torch', 'transformers') if sys.modules.get(name)])"
    )
    setup = msgspec.json.encode(DecodingSetup(str(make_image_files(tmp_path))))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    started = subprocess.run(command, input=setup, capture_output=True, check=True, env=os.environ | environment)
    assert (started.stdout, started.stderr) == (b"['transformers']\n", b"")


@pytest.mark.parametrize(
    ("end", "refusal", "reason"),
    [
        (JobKilled("killed by the signal 9"), Unavailable, "at this moment. Please retry"),
        (JobOutOfMemory(), InvalidRequest, "too much memory or time"),
        (JobEnded("it gave no answer"), InvalidRequest, "too much memory or time"),
    ],
)
def test_a_decoder_that_is_killed_is_no_fault_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: SandboxError, refusal: type[ServingError], reason: str
) -> None:
    monkeypatch.setattr(Sandbox, "run", Mock(side_effect=end))

    async def test(made: Harness) -> None:
        with pytest.raises(refusal, match=reason) as refused:
            await made.begin(**chat(turn("a", (0, source(saved(picture()))))))
        is_ours = refusal is Unavailable
        assert (refused.value.status, refused.value.retry_after is not None) == (503 if is_ours else 400, is_ours)

    in_images(test, tmp_path)


PUBLIC = "93.184.216.34"


def web_of(made: Harness, answer: Callable[[httpx.Request], httpx.Response], **names: str) -> None:
    """Answer the calls of the reader without a network; `names` have addresses."""
    assert made.images is not None
    resolver = Resolver("images", lookup=lambda host: [names[host.partition(".")[0]]])
    transport = PublicTransport(resolver, ports=(80, 443))
    transport._inner = httpx.MockTransport(answer)  # type: ignore[assignment]
    made.images._client._transport = transport


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1/a.png", "no public address"),
        ("http://[::1]/a.png", "no public address"),
        ("http://169.254.169.254/latest/meta-data", "no public address"),
        ("http://2130706433/a.png", "not a public address"),
        ("http://inside.example/a.png", "has no public address"),
        ("http://outside.example:22/a.png", "the port 22 is not allowed"),
        ("http://outside.example/to-inside", "has no public address"),
        ("http://outside.example/to-loopback", "has no public address"),
        ("http://outside.example/to-port", "the port 6379 is not allowed"),
        ("http://outside.example/zipped", "its reply is encoded"),
        ("ftp://outside.example/a.png", "begins with https"),
        ("http://", "begins with https"),
        ("http://a b", "not a public address"),
    ],
)
def test_an_address_that_is_not_public_is_never_called(tmp_path: Path, address: str, reason: str) -> None:
    called: list[str] = []
    moved = {
        "/to-inside": "http://inside.example/a.png",
        "/to-loopback": "http://127.0.0.1/a.png",
        "/to-port": "http://outside.example:6379/",
    }

    def answer(request: httpx.Request) -> httpx.Response:
        called.append(request.url.host)
        if request.url.path == "/zipped":
            return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b""))
        return httpx.Response(302, headers={"Location": moved[request.url.path]})

    async def test(made: Harness) -> None:
        web_of(made, answer, inside="10.0.0.1", outside=PUBLIC)
        with pytest.raises(InvalidRequest, match=reason) as refusal:
            await made.begin(**chat(turn("a", (0, source(address, kind="url")))))
        assert (refusal.value.field, refusal.value.code) == (WHERE, "invalid_image_url")
        assert set(called) <= {PUBLIC}

    in_images(test, tmp_path)


def test_fetched_images_count_in_the_tenants_memory_until_the_request_is_refused(tmp_path: Path) -> None:
    settings = ImageSettings(max_bytes=12 << 20, max_request_bytes=30 << 20, memory_bytes=64 << 20, fetch_seconds=30)

    async def test(made: Harness) -> None:
        web_of(made, lambda _: httpx.Response(200, stream=httpx.ByteStream(bytes(11 << 20))), outside=PUBLIC)
        one = source("http://outside.example/a.png", kind="url")
        with pytest.raises(TooManyImages):
            await made.begin(**chat(turn("a", (0, one), (0, one))))
        assert made.images is not None
        assert made.images._memory.held_by(made.principal.tenant) == 0

    in_images(test, tmp_path, settings)
