"""Images of prompts: patches become rows of the model's width, and these rows take the place of embeddings.

The vision tower is transformers' own module, with the connector that makes rows of the text's width. It computes one
image a call, outside the steps (`memory.image_rows`). In a step, an image's rows replace the embeddings of its
placeholders. Some towers also make rows for the first decoder layers, which are added to the layers' results
(DeepStack, Meng et al., 2024).

**Positions.** Each token has three: time, height and width (M-RoPE, Wang et al., 2024). Those of text are equal. An
image's rows count up from the position of its first token: one by time, its line and its column. The text after it
begins at the largest of them plus one, so positions after an image are less than the number of tokens. They are a
function of the tokens and grids before them alone. The model's rotary module reads them; pages and attention count
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel

from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.messages import ImageInput, Request
from loramux_adapters.families import FAMILIES, reads_other_inputs
from loramux_adapters.modules import LoraLinear

Ints = NDArray[np.signedinteger[Any]]

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

    positions: torch.Tensor
    """int64[3, T]: positions of all rows of the step, by time, height and width."""
    rows: torch.Tensor
    """int64[n]: the rows that are placeholders."""
    features: torch.Tensor | None
    """[1 + d, n, hidden]: embeddings of these rows, and what is added to them after each of the first d layers. None if
    n = 0, as in steps that decode."""

    @classmethod
    def of(cls, positions: Ints, found: Iterable[tuple[RowsOfImage, torch.Tensor]]) -> StepImages:
        """Make a step's images from its positions and its rows, each with all rows of its image."""
        places, features = [torch.empty(0, dtype=torch.int64)], []
        for place, rows in found:
            places.append(torch.arange(place.row, place.row + place.length))
            features.append(rows[:, place.first : place.first + place.length])
        joined = torch.cat(features, dim=1) if features else None
        return cls(torch.from_numpy(positions), torch.cat(places), joined)


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
        first, last = max(image.start, start), min(image.start + image.num_tokens, end)
        if first < last:
            yield RowsOfImage(row + first - start, request.id, image.digest, first - image.start, last - first)


class Tower:
    """The vision tower of a model, and the scaling of its inputs."""

    def __init__(self, module: nn.Module, scale: torch.Tensor, offset: torch.Tensor, depth: int) -> None:
        """`scale` and `offset` `[values of a patch]` make the tower's inputs from bytes. `depth`: rows that the tower
        makes for each token."""
        self._module: Any = module
        self._scale, self._offset = scale, offset
        config: Any = self._module.config
        self._merge = int(config.spatial_merge_size)
        dtype = next(module.parameters()).dtype
        self._row_bytes = depth * int(_out_width(config)) * dtype.itemsize

    def fault_of(self, image: ImageInput) -> str | None:
        """Return why the tower cannot compute `image`."""
        patches, unit = math.prod(image.grid), self._merge
        if min(image.grid) < 1 or image.grid[0] != 1 or image.grid[1] % unit or image.grid[2] % unit:
            return f"An image's grid is {image.grid}, which is not one picture of squares of {unit} x {unit} patches."
        if patches != image.num_tokens * unit**2 or len(image.patches) != patches * len(self._scale):
            return f"An image with the grid {image.grid} has {image.num_tokens} tokens and {len(image.patches)} bytes."
        return None

    def bytes_of(self, image: ImageInput) -> int:
        """Return the bytes of the rows of `image`."""
        return image.num_tokens * self._row_bytes

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> torch.Tensor:
        """Return the rows `[1 + d, num_tokens, hidden]` of `image`, in the model's dtype."""
        patches = torch.frombuffer(bytearray(image.patches), dtype=torch.uint8).view(-1, len(self._scale))
        pixels = patches.float().mul_(self._scale).add_(self._offset)
        output = self._module(pixels.to(self._module.dtype), grid_thw=torch.tensor([image.grid]), return_dict=True)
        deep_rows = getattr(output, "deepstack_features", None) or ()
        return torch.stack((output.pooler_output, *deep_rows))


def images_refused(directory: Path, config: PretrainedConfig, *, on_cpu: bool, num_ranks: int) -> str | None:
    """Return the reason why images of prompts are not served with the checkpoint in `directory`; None if they are."""
    if not reads_images_too(config):
        return "the model reads text alone"
    if not FAMILIES[config.model_type].reads_images:
        return "the engine serves the text of this family alone"
    if not on_cpu:
        return 'images are served on CPUs; set engine.device = "cpu"'
    if num_ranks > 1:
        return "images are served by one rank; set engine.tensor_parallel_size = 1"
    if not any((directory / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return "the checkpoint holds no preprocessor_config.json, which says how pixels are scaled"
    return None


def reads_images_too(config: PretrainedConfig) -> bool:
    """Return whether the model of `config` reads images in addition to text."""
    return config.model_type in FAMILIES and bool(FAMILIES[config.model_type].text_type)


def open_tower(model: PreTrainedModel, directory: Path) -> Tower:
    """Return the tower of `model`, whose images are not refused. Raises UnsupportedModel if the tower is quantized."""
    module: Any = next(m for name, m in model.named_modules() if reads_other_inputs(f"{name}."))
    if any(isinstance(part, LoraLinear) for part in module.modules()):
        raise UnsupportedModel("the checkpoint's vision tower is quantized")
    module.set_attn_implementation(TOWER_ATTENTION)
    processor: Any = AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")
    channels = int(module.config.in_channels)
    mean, deviation, factor = [0.0] * channels, [1.0] * channels, 1.0
    if processor.do_normalize:
        mean, deviation = list(processor.image_mean), list(processor.image_std)
    if processor.do_rescale:
        factor = float(processor.rescale_factor)
    values = module.config.temporal_patch_size * module.config.patch_size**2
    by_channel = torch.tensor([mean, deviation], dtype=torch.float64).repeat_interleave(values, dim=1)
    scale, offset = factor / by_channel[1], -by_channel[0] / by_channel[1]
    return Tower(module, scale.float(), offset.float(), 1 + num_deep_rows(model.config))


def num_deep_rows(config: PretrainedConfig) -> int:
    """Return the number of decoder layers to whose results rows of images are added."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def _out_width(config: Any) -> int:
    width: int = getattr(config, "out_hidden_size", None) or config.hidden_size
    return width
