"""Images of prompts: patches become rows of the model's width, and these rows take the place of embeddings.

The vision tower is transformers' own module, with the connector that makes rows of the text's width. It computes one
image a call, outside the steps (`memory.image_rows`). In a step, an image's rows replace the embeddings of its
placeholders. Some towers also make rows for the first decoder layers, which are added to the layers' results
(DeepStack, Meng et al., 2024). In some families, a token of text ends each line of an image's placeholders. `ImageForm`
says what a family does.

**Positions.** In most families each token has three: time, height and width (M-RoPE, Wang et al., 2024). Those of text
are equal. An image's rows count up from the position of its first token: one by time, its line and its column. The text
after it begins at the largest of them plus one, so positions after an image are less than the number of tokens. They
are a function of the tokens and grids before them alone. The model's rotary module reads them; pages and attention
count tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel
from transformers.models.pixtral import modeling_pixtral

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.memory.image_rows import ImageRows
from loramux.engine.messages import ImageInput, Request
from loramux_adapters.families import ImageForm, images_of, merge_of, reads_other_inputs
from loramux_adapters.modules import LoraLinear
from loramux_adapters.prepared import pinned_bytes
from loramux_kernels.device import to_device, to_host

Ints = NDArray[np.signedinteger[Any]]

CHANNELS = 3
"""Red, green and blue."""
TOWER_ATTENTION = "sdpa"
"""transformers' attention that the tower uses; the text's reads the pool's pages."""


class RowsOfImage(NamedTuple):
    """Consecutive rows of a step that belong to one image."""

    row: int
    """The first of them in the step."""
    request_id: str
    digest: str
    first: int
    """Its number in the image."""
    length: int


@dataclass(frozen=True, slots=True)
class StepImages:
    """The images of a step."""

    rows: torch.Tensor | slice
    """int64[n]: the rows that are placeholders."""
    features: torch.Tensor
    """[1 + d, n, hidden]: embeddings of these rows, and what is added to them after each of the first d layers."""

    @classmethod
    def at(cls, places: Sequence[RowsOfImage], no_rows: torch.Tensor) -> StepImages:
        """Return the images at `places` of a step, whose features are not filled in yet.

        `no_rows` `[1 + d, 0, hidden]` has the dtype and the device of the features.
        """
        numbers = np.concatenate([np.arange(place.row, place.row + place.length) for place in places])
        depth, _, hidden = no_rows.shape
        return cls(to_device(numbers, no_rows.device), no_rows.new_empty(depth, len(numbers), hidden))

    def fill(self, places: Sequence[RowsOfImage], image_rows: ImageRows[torch.Tensor]) -> None:
        """Copy the rows at `places` into the features. A GPU copies them while the host continues."""
        done = 0
        for place in places:
            rows = image_rows.rows_of(place.request_id, place.digest)
            for target, source in zip(self.features, rows, strict=True):  # each copy is of contiguous memory
                part = source[place.first : place.first + place.length]
                target[done : done + place.length].copy_(part, non_blocking=True)
            done += place.length


@dataclass(frozen=True, slots=True)
class ImageEffects:
    """Changes that images make to the steps of a model; none if it reads text alone."""

    has_places: bool = False
    """True if each token has a position in time, height and width."""
    layers_ahead: Literal["nowhere", "in every layer", "in windows"] = "nowhere"
    """Layers in which a token of an image sees the image's later tokens."""
    num_deep_rows: int = 0
    """Number of decoder layers to whose results rows of images are added."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> ImageEffects:
        """Return the effects in the model of `config`."""
        if (form := images_of(config.model_type)) is None:
            return cls()
        text, vision = config.get_text_config(), getattr(config, "vision_config", None)
        is_causal = form.sees_ahead == "in windows" and text.use_bidirectional_attention != "vision"
        num_deep_rows = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        return cls(form.has_places, "nowhere" if is_causal else form.sees_ahead, num_deep_rows)

    @property
    def sees_ahead(self) -> bool:
        """True if a token of an image sees later ones in some layers."""
        return self.layers_ahead != "nowhere"

    @property
    def reaches_layers(self) -> bool:
        """True if layers treat rows of images differently; False: an image changes only the inputs of the layers."""
        return self.sees_ahead or self.num_deep_rows > 0


NO_EFFECTS = ImageEffects()


def image_row_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Return (1 + d, hidden), the shape of a row of an image in the model of `config`; see `StepImages`."""
    return 1 + ImageEffects.of(config).num_deep_rows, int(config.get_text_config().hidden_size)


def row_ends(position_ids: Ints, images: Iterable[RowsOfImage]) -> Ints:
    """Return int32[T], one past the last position that each row sees, if rows of `images` see to the ends of theirs.

    `position_ids` int64[T] are the positions of the step's rows. The step holds each image to its end.
    """
    ends = (position_ids + 1).astype(np.int32)
    for place in images:
        ends[place.row : place.row + place.length] = ends[place.row + place.length - 1]
    return ends


def merge_size(image: ImageInput) -> int:
    """Return the patches along an edge of the square that becomes one token."""
    return math.isqrt(math.prod(image.grid) // image.num_tokens)


def rotary_positions(images: Sequence[ImageInput], start: int, end: int) -> Ints:
    """Return the positions int64[3, end - start] of the tokens [start, end) of a sequence with `images`."""
    positions = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    shift = 0
    for image in images:
        first, last = image.start, image.start + image.num_tokens
        if first >= end:
            break
        merge = merge_size(image)
        lines, columns = image.grid[1] // merge, image.grid[2] // merge
        if last > start:
            own = np.arange(max(first, start), min(last, end)) - first
            begin = first + shift
            places = np.stack((own // (lines * columns), own // columns % lines, own % columns)) + begin
            positions[:, own[0] + first - start : own[-1] + 1 + first - start] = places
        jump = max(lines, columns) - image.num_tokens
        shift += jump
        positions[:, max(last - start, 0) :] += jump
    return positions


def rows_of_images(request: Request, start: int, end: int, row: int) -> Iterator[RowsOfImage]:
    """Yield the rows of a chunk [start, end) of `request`, whose first row in the step is `row`, that are of images."""
    for image in request.images:
        if image.start >= end or image.start + image.num_tokens <= start:
            continue
        num_lines = max(1, image.num_lines)
        own, whole = image.num_placeholders // num_lines, image.num_tokens // num_lines
        for line in range(num_lines):
            begin = image.start + line * whole
            first, last = max(begin, start), min(begin + own, end)
            if first < last:
                number = line * own + first - begin
                yield RowsOfImage(row + first - start, request.id, image.digest, number, last - first)


class Tower:
    """The vision tower of a model, and the scaling of its inputs."""

    def __init__(
        self, model: PreTrainedModel, form: ImageForm, scale: torch.Tensor, offset: torch.Tensor, most_tokens: int
    ) -> None:
        """`scale` and `offset` `[channels, 1]` make the tower's inputs from bytes. `most_tokens`: those of the largest
        image of the checkpoint's image processor, if it is known."""
        self._model: Any = model
        self._form = form
        self._by_pixel = form.tower_reads == "placed patches"
        """True if the values of a pixel follow each other, and not those of a channel."""
        scale, offset = scale.to(model.device), offset.to(model.device)
        self._scale, self._offset = (scale.T, offset.T) if self._by_pixel else (scale, offset)
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        config: Any = model.config
        vision = config.vision_config
        self._patch = int(vision.patch_size)
        self._patch_bytes = CHANNELS * getattr(vision, "temporal_patch_size", 1) * self._patch**2
        self._merge = merge_of(config, form)
        self._side = int(vision.image_size) // self._patch if form.tower_reads == "a square" else None
        effects = ImageEffects.of(config)
        self.gpu_bytes = 0
        """Memory of a GPU that the largest image takes while it is computed."""
        self._most_tokens = most_tokens
        self.whole_tokens = most_tokens if effects.sees_ahead else 0
        """Most tokens of an image, whose tokens one step must compute together; 0: they need not be."""
        self._row_bytes = math.prod(image_row_shape(config)) * model.dtype.itemsize

    def measure(self, most_tokens: int) -> None:
        """Compute a blank image of up to `most_tokens` tokens on a GPU, and set `gpu_bytes`.

        The GPU loads its operators for it, so no image of a request waits for that. Raises torch.OutOfMemoryError.
        """
        if self._stream is None:
            return
        device = self._model.device
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights may still be copied
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.encode(self.blank_image(most_tokens))
        self.gpu_bytes = torch.cuda.max_memory_allocated(device) - before

    def blank_image(self, most_tokens: int) -> ImageInput:
        """Return the largest square image of up to `most_tokens` tokens that the tower reads."""
        side = math.isqrt(min(most_tokens, self._most_tokens or most_tokens))
        if self._side is not None:
            side = self._side // self._merge
        elif self._form.tower_reads == "a picture":  # its table of positions ends there
            side = min(side, int(self._model.config.vision_config.image_size) // (self._patch * self._merge))
        edge, num_lines = side * self._merge, side if self._form.breaks_lines else 0
        num_tokens, patches = side * side + num_lines, bytes(edge * edge * self._patch_bytes)
        return ImageInput(
            digest="", patches=patches, grid=(1, edge, edge), start=0, num_tokens=num_tokens, num_lines=num_lines
        )

    def fault_of(self, image: ImageInput) -> str | None:
        """Return why the tower cannot compute `image`."""
        patches, unit = math.prod(image.grid), self._merge
        if min(image.grid) < 1 or image.grid[0] != 1 or image.grid[1] % unit or image.grid[2] % unit:
            return f"An image's grid is {image.grid}, which is not one picture of squares of {unit} x {unit} patches."
        if self._side is not None and set(image.grid[1:]) != {self._side}:
            return f"An image's grid is {image.grid}, and the tower reads {self._side} x {self._side} patches."
        if self.whole_tokens and image.num_tokens > self.whole_tokens:
            return f"An image has {image.num_tokens} tokens, more than {self.whole_tokens}, those of the largest image."
        num_lines = image.grid[1] // unit if self._form.breaks_lines else 0
        is_whole = patches == image.num_placeholders * unit**2 and image.num_lines == num_lines
        if not is_whole or len(image.patches) != patches * self._patch_bytes:
            return f"An image with the grid {image.grid} has {image.num_tokens} tokens and {len(image.patches)} bytes."
        return None

    def bytes_of(self, image: ImageInput) -> int:
        """Return the bytes of the host's memory that the rows of `image` occupy."""
        num_bytes = image.num_placeholders * self._row_bytes
        return num_bytes if self._stream is None else pinned_bytes(num_bytes)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> torch.Tensor:
        """Return the rows `[1 + d, num_placeholders, hidden]` of `image` on the host, in the model's dtype.

        A GPU computes them on a separate stream, next to the steps, and this thread waits for it.
        """
        if self._stream is None:
            return self._compute(image)
        with torch.cuda.stream(self._stream):
            rows = to_host(self._compute(image))
            ended = torch.cuda.Event(blocking=True)  # a thread that waits for it takes no core
            ended.record()
        ended.synchronize()
        return rows

    def _compute(self, image: ImageInput) -> torch.Tensor:
        reads, in_patches = self._form.tower_reads, self._form.tower_reads.endswith("patches")
        device = self._model.device
        values = torch.frombuffer(bytearray(image.patches), dtype=torch.uint8).to(device)
        channels = (-1, CHANNELS) if self._by_pixel else (CHANNELS, -1)
        by_channel = values.view(math.prod(image.grid) if in_patches else 1, *channels)
        pixels = by_channel.float().mul_(self._scale).add_(self._offset)
        if reads == "placed patches":  # the tower itself shifts the values, in float32
            inputs = {"pixel_values": pixels.view(1, len(pixels), -1), "image_position_ids": _places(image).to(device)}
        elif reads == "patches":
            patches = pixels.flatten(1).to(self._model.dtype)
            inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([image.grid], device=device)}
        else:
            size, copies = [side * self._patch for side in image.grid[1:]], 1
            sizes: dict[str, torch.Tensor] = {}
            if reads == "a picture":
                # Of all images together transformers drops the dimension of a single row: two equal pictures have two.
                copies += image.num_placeholders == 1
                sizes = {"image_sizes": torch.tensor([size] * copies, device=device)}
            pictures = pixels.unflatten(2, size).to(self._model.dtype).expand(copies, -1, -1, -1)
            inputs = {"pixel_values": pictures} | sizes
        output = self._model.get_image_features(**inputs)
        deep_rows = getattr(output, "deepstack_features", None) or ()
        return torch.stack([by_image[0] for by_image in (output.pooler_output, *deep_rows)])


def _places(image: ImageInput) -> torch.Tensor:
    """Return int64[1, patches, 2]: the column and the line of each patch."""
    lines, columns = torch.meshgrid(*(torch.arange(side) for side in image.grid[1:]), indexing="ij")
    return torch.stack((columns, lines), dim=-1).view(1, -1, 2)


def images_refused(directory: Path, config: PretrainedConfig) -> str | None:
    """Return the reason why images of prompts are not served with the checkpoint in `directory`; None if they are."""
    if (form := images_of(config.model_type)) is None:
        return "the model reads text alone"
    if getattr(config, "vision_config", None) is None:
        return "the checkpoint has no vision tower"
    return _missing_file(directory, form)


def _missing_file(directory: Path, form: ImageForm) -> str | None:
    """Return which of the files that say how images are shown the checkpoint lacks."""
    if not any((directory / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return "the checkpoint holds no preprocessor_config.json, which says how pixels are scaled"
    if form.breaks_lines and not (directory / "processor_config.json").is_file():
        return "the checkpoint holds no processor_config.json, which names the tokens after the lines of an image"
    return None


def open_tower(model: PreTrainedModel, directory: Path) -> Tower:
    """Return the tower of `model`, whose images are not refused. Raises UnsupportedModel if the tower is quantized."""
    form = images_of(model.config.model_type)
    assert form is not None, "the images of other families are refused"
    parts = {name: part for name, part in model.named_modules() if reads_other_inputs(f"{name}.")}
    if any(isinstance(part, LoraLinear) for part in parts.values()):
        raise UnsupportedModel("the checkpoint's vision tower is quantized")
    for name, part in parts.items():
        if isinstance(part, PreTrainedModel) and "audio" not in name:
            part.set_attn_implementation(TOWER_ATTENTION)
    if form.tower_reads == "a picture":
        _mask_no_single_image()
    processor: Any = AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")
    most_tokens = int(getattr(processor, "max_soft_tokens", 0))
    if form.tower_reads == "a square":
        _check_square(processor, model.config)
        most_tokens = int(model.config.mm_tokens_per_image)
    if ImageEffects.of(model.config).sees_ahead and not most_tokens:
        raise UnsupportedModel("the image processor's files lack max_soft_tokens, the most tokens of an image")
    mean, deviation, factor = [0.0] * CHANNELS, [1.0] * CHANNELS, 1.0
    if processor.do_normalize:
        mean, deviation = list(processor.image_mean), list(processor.image_std)
    if processor.do_rescale:
        factor = float(processor.rescale_factor)
    by_channel = torch.tensor([mean, deviation], dtype=torch.float64)[..., None]
    scale, offset = factor / by_channel[1], -by_channel[0] / by_channel[1]
    return Tower(model, form, scale.float(), offset.float(), most_tokens)


def _mask_no_single_image() -> None:
    """Let transformers' tower of pictures make no mask for one image, which has no patches of others to mask. The mask
    would have an element for each pair of patches: 0.6 GB for 12,000 patches in float32.
    """
    make_mask = modeling_pixtral.generate_block_attention_mask
    if isinstance(make_mask, partial):
        return  # of an earlier tower in this process

    def mask_others(make: Callable[..., torch.Tensor], patches: Sequence[int], rows: torch.Tensor) -> Any:
        return None if len(patches) == 1 else make(patches, rows)

    modeling_pixtral.generate_block_attention_mask = partial(mask_others, make_mask)


def _check_square(processor: Any, config: Any) -> None:
    """Raise UnsupportedModel if the image processor makes anything else of an image than the square that the tower
    reads, or if the tower's patches are no whole tokens."""
    side, patch, tokens = config.vision_config.image_size, config.vision_config.patch_size, config.mm_tokens_per_image
    merge, edge = side // patch // math.isqrt(tokens), math.isqrt(tokens)
    if edge**2 != tokens or merge * edge * patch != side:
        raise UnsupportedModel(
            f"config.json's mm_tokens_per_image = {tokens} does not divide pictures of {side} x {side} pixels in "
            f"patches of {patch}"
        )
    if processor.do_pan_and_scan:
        raise UnsupportedModel("preprocessor_config.json's do_pan_and_scan cuts an image into several; set it to false")
    if dict(processor.size) != {"height": side, "width": side}:
        raise UnsupportedModel(
            f"preprocessor_config.json's size is {dict(processor.size)}, and config.json's vision_config.image_size "
            f"{side}"
        )
