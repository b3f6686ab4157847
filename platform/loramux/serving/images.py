"""Images of prompts, from what a caller sends to what the engine gets.

    ImageSource: base64, an address, or the id of a file ── fetch ──> bytes ── a limited process ──> patches
    template: one pad token an image ── the tokens of the image ──> prompt_token_ids, ImageInputs

Every bound is checked before the bytes that it bounds are used: number and size of the images, then the header of each
(`image_decoding`). A tenant has shares of the calls to other machines, of the decoding processes, and of the memory
that images of running requests hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import HeldUnits, TenantSlots, ThreadPool
from loramux.common.public_http import (
    ANYWHERE,
    MAX_BYTES,
    TENANT,
    NotPublic,
    PublicTransport,
    ReplyRefused,
    Resolver,
    outside_client,
    parse_outside_url,
)
from loramux.common.sandbox.sandbox import JobLimits, Sandbox, SandboxDied, SandboxError
from loramux.common.settings.serving import ImageSettings
from loramux.engine.messages import ImageInput
from loramux.serving.errors import InvalidRequest, Unavailable
from loramux.serving.image_decoding import FORMATS, DecodedImage, DecodingJob, DecodingSetup, ImageFault
from loramux.serving.messages import ChatOptions, Conversation, GenerationRequest, ImageSource, Truncation
from loramux.serving.tokenizer import Tokenizer
from loramux_adapters.families import ImageForm, images_of, merge_of

INVALID_IMAGE = "invalid_image"
INVALID_URL = "invalid_image_url"
SMALL_TOKENS = 256
"""Maximum number of tokens of an image with `detail: "low"`."""
NICENESS = 10
"""Niceness of the decoding processes, as of the vision tower: a step gets nine tenths of a core that both use."""
FETCHES, FETCHES_PER_TENANT = 32, 8
"""Images that are fetched at the same time."""
MAX_REDIRECTS = 3
CPU_SECONDS, WALL_SECONDS = 10.0, 30.0
"""Limits of the decoding of one image."""
PROCESS_BYTES, BYTES_PER_PIXEL = 256 << 20, 32
"""Memory that decoding takes: for the result, and for every pixel of the file with its copies in other modes."""
REASONS: Mapping[ImageFault, str] = {
    "no_base64": "its data is no base64",
    "too_large": "it has more than {bounds.max_bytes} bytes, the most",
    "unknown_format": "it is none of {formats}",
    "too_many_pixels": "it has {width} x {height} pixels, and the most is {bounds.max_pixels}",
    "too_many_scans": "it is a JPEG of too many scans; save it again",
    "animated": "it is animated; send one picture",
    "too_narrow": "it has {width} x {height} pixels, and one side is more than 200 times the other",
    "broken": "its file is damaged or cut off",
    "too_many_tokens": "this model gives each image more tokens than {bounds.max_tokens}, the most (images.max_tokens)",
}
"""Reasons why an image is refused."""
T = TypeVar("T")
ReadFile = Callable[[Principal, str, int], Awaitable[bytes]]
"""Returns the bytes of a caller's file, by its id, up to a maximum. Raises LoramuxError."""


class TooManyImages(Unavailable):
    """The tenant's running requests hold all the memory that it may have for images."""

    code = "too_many_images"
    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self) -> None:
        super().__init__("Your running requests hold too many images at once. Please send fewer.")


class _Processor(msgspec.Struct):
    """The facts of an image processor, under its own names; all are given if it cuts images into patches."""

    patch_size: int = 0
    temporal_patch_size: int = 0
    merge_size: int = 0


class _Checkpoint(msgspec.Struct):
    model_type: str = ""
    image_token_id: int | None = None


class _ProcessorFile(msgspec.Struct):
    image_processor: _Processor = msgspec.field(default_factory=_Processor)


class _PictureFile(msgspec.Struct):
    """The facts of a processor of texts and pictures, with transformers' defaults for the texts of tokens."""

    patch: int = msgspec.field(default=0, name="patch_size")
    merge: int = msgspec.field(default=0, name="spatial_merge_size")
    placeholder: str = msgspec.field(default="[IMG]", name="image_token")
    after_line: str = msgspec.field(default="[IMG_BREAK]", name="image_break_token")
    at_end: str = msgspec.field(default="[IMG_END]", name="image_end_token")


@dataclass(frozen=True)
class ImageFormat:
    """A base's form of images: its pad token, its patches, and the process that decodes with its image processor."""

    token_id: int
    """Token of which a prompt has one for each placeholder."""
    token: str
    patch_bytes: int
    """Bytes of a patch, one for each value."""
    merge: int
    """Patches along an edge of the square that becomes one placeholder."""
    sandbox: Sandbox
    line_ends: tuple[int, int] | None = None
    """Token after a line of placeholders, and token after the last line; None: placeholders follow each other."""
    texts: tuple[str, str] | None = None
    """The text of an image in the chat template, and the text that replaces it, which has one pad token; None: the
    template has the pad token."""

    @classmethod
    def load(cls, model_dir: Path, tokenizer: Tokenizer) -> ImageFormat | None:
        """Return the form that a checkpoint's files describe; None if it is none that this server decodes."""
        checkpoint, file = _read(model_dir / "config.json", _Checkpoint), model_dir / "processor_config.json"
        form = images_of(checkpoint.model_type)
        if form is not None and form.tower_reads == "a picture":
            return cls._of_pictures(model_dir, tokenizer, _read(file, _PictureFile))
        if form is not None and form.tower_reads != "patches":
            return cls._between_marks(model_dir, tokenizer, form)
        processor = _read(model_dir / "preprocessor_config.json", _Processor)
        if not processor.merge_size:
            processor = _read(file, _ProcessorFile).image_processor
        token_id, patch, depth = checkpoint.image_token_id, processor.patch_size, processor.temporal_patch_size
        if token_id is None or not (patch and depth and processor.merge_size):
            return None
        sandbox = _sandbox(DecodingSetup(str(model_dir)))
        return cls(token_id, tokenizer.pieces([token_id])[0], 3 * depth * patch**2, processor.merge_size, sandbox)

    @classmethod
    def _of_pictures(cls, model_dir: Path, tokenizer: Tokenizer, facts: _PictureFile) -> ImageFormat | None:
        """Return the form of pictures with tokens after their lines."""
        patch, merge = facts.patch, facts.merge
        texts = (facts.placeholder, facts.after_line, facts.at_end)
        token_ids = [token for text in texts if (token := tokenizer.token_id(text)) is not None]
        if len(token_ids) < len(texts) or not (patch and merge):
            return None
        sandbox = _sandbox(DecodingSetup(str(model_dir), "a picture", patch, merge))
        return cls(token_ids[0], facts.placeholder, 3 * patch**2, merge, sandbox, (token_ids[1], token_ids[2]))

    @classmethod
    def _between_marks(cls, model_dir: Path, tokenizer: Tokenizer, form: ImageForm) -> ImageFormat:
        """Return the form of images with a mark before and a mark after their placeholders."""
        from transformers import AutoConfig  # the families name these facts differently

        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        patch, merge = config.vision_config.patch_size, merge_of(config, form)
        token, first, last = tokenizer.pieces([config.image_token_id, config.boi_token_id, config.eoi_token_id])
        placed = f"{first}{token}{last}"
        # As transformers' processors: Gemma 3's template has the first mark for an image, which gets empty lines.
        texts = (first, f"\n\n{placed}\n\n") if form.tower_reads == "a square" else (token, placed)
        sandbox = _sandbox(DecodingSetup(str(model_dir), form.tower_reads, patch, merge))
        return cls(config.image_token_id, token, 3 * patch**2, merge, sandbox, texts=texts)

    def tokens_of(self, image: ImageInput) -> list[int]:
        """Return the tokens of an image in a prompt."""
        if self.line_ends is None:
            return [self.token_id] * image.num_tokens
        after_line, at_end = self.line_ends
        columns = image.num_placeholders // image.num_lines
        line = [*[self.token_id] * columns, after_line]
        return [*(line * image.num_lines)[:-1], at_end]

    def check_unplaced(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse a prompt without images that has the pad token. Raises InvalidRequest."""
        if self.token_id in token_ids:
            raise _spelled(f"{self.token} (token {self.token_id})", field)

    def start(self) -> None:
        """Start the process that decodes, so that the first image need not wait for its imports."""
        self.sandbox.start()

    def close(self) -> None:
        """Stop the process that decodes."""
        self.sandbox.close()


def _sandbox(setup: DecodingSetup) -> Sandbox:
    return Sandbox("loramux.serving.image_decoding", msgspec.json.encode(setup), NICENESS)


def _read(path: Path, kind: type[T]) -> T:
    """Return the facts in a file of a checkpoint; without the file, none."""
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.is_file() else kind()


class ImageReader:
    """Reads the images of requests, for every base."""

    def __init__(self, settings: ImageSettings, resolver: Resolver | None = None) -> None:
        self._settings = settings
        is_open = settings.allow_private_addresses
        transport = PublicTransport(
            resolver or Resolver("images"), ANYWHERE if is_open else (), ports=() if is_open else settings.ports
        )
        self._client = outside_client(settings.fetch_seconds, transport)
        self._client.max_redirects = MAX_REDIRECTS
        self._client.cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # tenants share the client
        self._read_file: ReadFile | None = None
        self._fetches = TenantSlots(FETCHES, FETCHES_PER_TENANT)
        self._threads = ThreadPool("images", settings.processes, max(1, settings.processes // 2))
        self._memory = TenantSlots(settings.memory_bytes, settings.tenant_bytes)

    @property
    def max_request_bytes(self) -> int:
        """Maximum bytes of the files of a request's images together."""
        return self._settings.max_request_bytes

    def read_files_with(self, read: ReadFile) -> None:
        """Read images that are files of the caller with `read`."""
        self._read_file = read

    async def place(
        self,
        principal: Principal,
        format: ImageFormat,
        conversation: Conversation,
        token_ids: list[int],
        copies: int,
        resources: ExitStack,
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Read the images of a conversation with these tokens, and return the tokens with a placeholder for each of the
        images' own.

        `copies` is the number of choices that get the images. The memory of the images is held until `resources` ends.
        Raises InvalidRequest, and TooManyImages or Unavailable if there is no room now.
        """
        sources = _sources(conversation)
        if len(sources) > (limit := self._settings.max_per_request):
            raise InvalidRequest(
                f"This request has {len(sources)} images, and the most is {limit}. Send fewer.",
                field=sources[limit].where,
                code="too_many_images",
            )
        if (count := token_ids.count(format.token_id)) != len(sources):
            raise InvalidRequest(
                f"This model's chat template shows {count} of the {len(sources)} images in 'messages'. Send images in "
                "turns of the user.",
                field="messages",
                code=INVALID_IMAGE,
            )
        held = HeldUnits(self._memory, principal.tenant)
        resources.callback(held.release)
        placed, images = list[int](), list[ImageInput]()
        begin = 0
        for source, data in zip(sources, await self._fetch_all(principal, sources, held), strict=True):
            image = await self._threads.run(principal.tenant, self._decode, format, source, data)
            size = len(image.patches) * copies
            if size > self._settings.tenant_bytes:
                raise _too_much(source, copies)
            if not held.try_add(size):
                raise TooManyImages
            position = token_ids.index(format.token_id, begin)
            placed += token_ids[begin:position]
            images.append(msgspec.structs.replace(image, start=len(placed)))
            placed += format.tokens_of(image)
            begin = position + 1
        return placed + token_ids[begin:], tuple(images)

    async def close(self) -> None:
        """End the threads and connections."""
        self._threads.close()
        await self._client.aclose()

    async def _fetch_all(
        self, principal: Principal, sources: Sequence[ImageSource], held: HeldUnits
    ) -> list[str | bytes]:
        """Return the files of the images: those that the request holds as base64."""
        sent = sum(len(source.value) * 3 // 4 for source in sources if source.kind == "data")
        room = _Room(self._settings.max_request_bytes - sent, held)
        fetches = [self._fetch(principal, source, room) for source in sources]
        found: list[str | bytes | BaseException] = await asyncio.gather(*fetches, return_exceptions=True)
        if failed := [one for one in found if isinstance(one, BaseException)]:
            raise failed[0]
        if room.left < 0:
            raise InvalidRequest(
                f"The images of this request have more than {self._settings.max_request_bytes} bytes together. Send "
                "fewer, or smaller ones.",
                field=sources[-1].where,
                code="request_too_large",
            )
        return [one for one in found if not isinstance(one, BaseException)]

    async def _fetch(self, principal: Principal, source: ImageSource, room: _Room) -> str | bytes:
        if source.kind == "data" or room.left < 0:
            return source.value
        data = await (self._fetch_url if source.kind == "url" else self._fetch_file)(principal, source)
        room.take(len(data))
        return data

    async def _fetch_file(self, principal: Principal, source: ImageSource) -> bytes:
        """Return the bytes of a file of the caller. Raises InvalidRequest."""
        if self._read_file is None:
            raise InvalidRequest(f"'{source.where}' names a file, and this server keeps none.", source.where)
        try:
            async with self._fetches.slot(principal.tenant):
                return await self._read_file(principal, source.value, self._settings.max_bytes)
        except LoramuxError as error:
            error.field = source.where
            raise

    async def _fetch_url(self, principal: Principal, source: ImageSource) -> bytes:
        """Return what an address answers. Raises InvalidRequest."""
        try:
            async with asyncio.timeout(self._settings.fetch_seconds), self._fetches.slot(principal.tenant):
                return await self._get(principal, source.value)
        except TimeoutError:
            why = f"it has not arrived within {self._settings.fetch_seconds:g} seconds"
        except (NotPublic, ReplyRefused, _NoImage) as error:
            why = str(error)
        except httpx.TooManyRedirects:
            why = f"it redirects more than {MAX_REDIRECTS} times"
        except (httpx.HTTPError, httpx.InvalidURL):  # a redirect may lead to an invalid address
            why = "its address gives no answer"
        raise InvalidRequest(
            f"'{source.where}' cannot be fetched: {why}. Send the image itself, as a data URL.",
            field=source.where,
            code=INVALID_URL,
        )

    async def _get(self, principal: Principal, address: str) -> bytes:
        url = parse_outside_url(address)
        if url.scheme not in ("http", "https") or not url.host:
            raise _NoImage("an address begins with https:// or http://")
        extensions = {TENANT: principal.tenant, MAX_BYTES: self._settings.max_bytes}
        request = self._client.build_request("GET", url, headers={"Accept": "image/*"}, extensions=extensions)
        response = await self._client.send(request, stream=True, follow_redirects=True)
        try:
            if response.status_code != HTTPStatus.OK:
                raise _NoImage(f"its address answers {response.status_code}")
            return await response.aread()
        finally:
            await response.aclose()

    def _decode(self, format: ImageFormat, source: ImageSource, data: str | bytes) -> ImageInput:
        """Decode an image in a limited process. Runs on a thread. Raises InvalidRequest or Unavailable."""
        bounds = self._settings
        max_tokens = min(bounds.max_tokens, SMALL_TOKENS) if source.is_small else bounds.max_tokens
        result_bytes = max_tokens * format.merge**2 * format.patch_bytes
        is_base64 = isinstance(data, str)
        job = DecodingJob(is_base64, bounds.max_bytes, bounds.max_pixels, max_tokens)
        file = data.encode() if isinstance(data, str) else data
        memory = PROCESS_BYTES + 16 * result_bytes + BYTES_PER_PIXEL * bounds.max_pixels
        limits = JobLimits(memory, CPU_SECONDS, WALL_SECONDS, answer_bytes=result_bytes + (1 << 16))
        try:
            ended = format.sandbox.run(msgspec.json.encode(job), limits, file)
            decoded = msgspec.json.decode(ended.value, type=DecodedImage)
        except SandboxDied:
            raise Unavailable("Images cannot be read at this moment. Please retry.", code="server_busy") from None
        except (SandboxError, ValueError, RecursionError):  # an image that takes over its process may answer anything
            raise _invalid(source, "it takes too much memory or time to decode") from None
        if decoded.fault is not None:
            raise _invalid(source, self._reason(decoded))
        if (image := _input_of(decoded, ended.bulk, format, max_tokens)) is None:
            raise _invalid(source, self._reason(decoded))
        return image

    def _reason(self, decoded: DecodedImage) -> str:
        width, height = decoded.size
        bounds, formats = self._settings, ", ".join(FORMATS)
        return REASONS[decoded.fault or "broken"].format(width=width, height=height, bounds=bounds, formats=formats)


class _NoImage(Exception):
    """An address gives no image. The message says why."""


class _Room:
    """Bytes that the fetched files of a request's images may still have, in the tenant's share of the memory."""

    def __init__(self, left: int, held: HeldUnits) -> None:
        self.left, self._held = left, held

    def take(self, count: int) -> None:
        """Take the bytes of a file; `left` is negative if they are too many. Raises TooManyImages."""
        self.left -= count
        if not self._held.try_add(count):
            raise TooManyImages


def check_images(
    asked: GenerationRequest, conversation: Conversation, options: ChatOptions, format: ImageFormat | None, base: str
) -> ChatOptions:
    """Return the options with which the template shows images. Refuse images that the base named `base` cannot answer,
    and texts that spell the pad token: raises InvalidRequest.
    """
    first = _sources(conversation)[0]
    if format is None or asked.pooling is not None:
        why = f"this model reads text only: its base is '{base}'" if format is None else "vectors are made of text only"
        raise InvalidRequest(
            f"'{first.where}' is of the type '{first.type}', and {why}; leave it out.",
            field=first.where,
            code="unsupported_parameter",
        )
    texts = [turn.content for turn in conversation]
    texts += [msgspec.json.encode(one).decode() for one in (options.template, *(turn.fields for turn in conversation))]
    if any(format.token in text for text in texts):
        raise _spelled(f"{format.token} (token {format.token_id})", "messages")
    if format.texts is not None:
        if any(format.texts[0] in text for text in texts):
            raise _spelled(format.texts[0], "messages")
        if asked.sampling.prompt_logprobs is not None:  # all its rows would be scored in one step
            raise InvalidRequest(
                "'prompt_logprobs' is not possible with images of this model, because each is computed whole; leave it "
                "out.",
                field="prompt_logprobs",
                code="unsupported_parameter",
            )
    return replace(options, image_texts=format.texts)


def _sources(conversation: Conversation) -> list[ImageSource]:
    return [image.source for turn in conversation for image in turn.images]


def _spelled(mark: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{field}' holds {mark}, which marks the place of an image for this model. Leave it out of texts, and send an "
        "image as a part of a message.",
        field=field,
        code="invalid_value",
    )


def shortened_images(
    images: Sequence[ImageInput], num_tokens: int, truncation: Truncation, room: int
) -> tuple[ImageInput, ...]:
    """Return the images in the kept tokens of a prompt. Raises InvalidRequest if an image would be cut."""
    kept = truncation.kept(num_tokens, room)
    found = []
    for image in images:
        end = image.start + image.num_tokens
        if kept.start <= image.start and end <= kept.stop:
            found.append(msgspec.structs.replace(image, start=image.start - kept.start))
        elif image.start < kept.stop and kept.start < end:
            raise InvalidRequest(
                "'truncate_prompt_tokens' would cut an image of the prompt. Send a shorter prompt, or fewer images.",
                field="truncate_prompt_tokens",
            )
    return tuple(found)


def _input_of(decoded: DecodedImage, patches: bytes, format: ImageFormat, max_tokens: int) -> ImageInput | None:
    """Return the engine's form of an image; None if the process that decoded it, which is not trusted, does not keep
    its bounds.
    """
    lines, columns = (side // format.merge for side in decoded.grid[1:])
    num_lines = 0 if format.line_ends is None else lines
    num_tokens = lines * columns + num_lines
    is_whole = decoded.grid == (1, lines * format.merge, columns * format.merge)
    if not is_whole or min(lines, columns) < 1 or num_tokens > max_tokens:
        return None
    if len(patches) != math.prod(decoded.grid) * format.patch_bytes:
        return None
    digest = hashlib.sha256(struct.pack("<3q", *decoded.grid))
    digest.update(patches)
    return ImageInput(
        digest=digest.hexdigest(),
        patches=patches,
        grid=decoded.grid,
        start=0,
        num_tokens=num_tokens,
        num_lines=num_lines,
    )


def _invalid(source: ImageSource, why: str) -> InvalidRequest:
    return InvalidRequest(f"'{source.where}' is no image that can be read: {why}.", source.where, code=INVALID_IMAGE)


def _too_much(source: ImageSource, copies: int) -> InvalidRequest:
    return InvalidRequest(
        f"'{source.where}' is too large for {copies} choices, each of which gets the image. Lower 'n'.",
        field="n",
        code="request_too_large",
    )
