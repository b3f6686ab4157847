"""Loading of a transformers checkpoint: the result is a model that answers as transformers does, or a refusal of one
sentence.

transformers loads much that must not be served: it fills missing weights with random numbers, and its attention
interface drops flags that our attention function never sees. Its models may also use **facts of the whole batch**, such
as the longest position, although a packed batch holds many requests. Everything of that kind is refused or switched off
here, so a request's answer never depends on the other requests. `tests/platform/engine/test_neighbours.py` varies the
other requests for every supported family.

`LoadingProgress` reports progress: on a terminal in one line that changes, elsewhere in a log line every few seconds.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import set_tqdm_hook

from loramux.common.bundle import SamplingDefaults
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.quantized_checkpoint import (
    format_of,
    loading_config,
    quantized_linears,
    read_quantized,
)
from loramux.engine.execution.sharded_checkpoint import CheckpointShare, load_share_of
from loramux_adapters.base import MODEL_LOCK, auto_class, served_config
from loramux_adapters.base_weights import QuantizedLinear
from loramux_adapters.checkpoint_config import is_classifier, refusal_of_config
from loramux_adapters.families import (
    SWITCHING_ROPES,
    Encoder,
    encoder_of,
    family_of,
    reads_other_inputs,
    tensors_of_heads,
)
from loramux_adapters.sharding import is_held_by
from loramux_kernels.device import multiplies_in_hardware

logger = logging.getLogger(__name__)

LEFTOVERS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors that older versions of transformers saved and that follow from the config: the only ones that may have no
place in the model."""

OTHER_HEADS = re.compile(r"(?:cls|lm_head|decoder|vocab_\w+|\w+_predictions|generator_\w+|(?:\w+\.)?pooler)\.")
"""Tensors of an encoder's checkpoint that its vectors and classes do not read: heads that predict tokens, and poolers
of families whose classifiers have none."""

SAMPLES = 256
"""Values of a weight that are compared between engines."""

HALF = (torch.bfloat16, torch.float16)

FIRST_AFTER_S = 2.0
"""Seconds of loading before anything is reported."""
LOG_EVERY_S = 5.0
REDRAW_EVERY_S = 0.2

Item = TypeVar("Item")


def load_checkpoint(
    directory: Path,
    dtype: str,
    device: torch.device,
    share: CheckpointShare | None = None,
    progress: LoadingProgress | None = None,
) -> PreTrainedModel:
    """Load the model in `directory` onto `device`, or a `share` of it.

    `dtype` is a name, or auto: as saved, or float32 on a CPU that would emulate it. Raises UnsupportedModel if the
    model would be served wrongly, or its files do not fit its config.
    """
    config = read_config(directory)
    chosen = _widened(config, dtype, device)
    wanted = chosen or ("auto" if dtype == "auto" else getattr(torch, dtype))
    form: dict[str, Any] = {"config": config}
    is_part = _is_part_of(directory, config)
    if is_part:  # the names of the whole model's tensors
        form["key_mapping"] = {r"^language_model\.": ""}
    quantized: list[str] = []
    if (stored := format_of(vars(config))) is not None:
        rank = 0 if share is None else share.rank
        quantized = [name for name in quantized_linears(directory, config, stored) if is_held_by(rank, name)]
        form["config"] = loading_config(config, quantized)
        logger.info("%d weights are %s in the checkpoint, and stay so in memory", len(quantized), stored.name)
    progress = progress or LoadingProgress.silent()
    try:
        with MODEL_LOCK, progress.of_transformers(f"weights of {_size_of(directory)}"):
            if share is not None:
                model, report = load_share_of(directory, config, wanted, share, quantized)
            else:
                model, report = auto_class(config).from_pretrained(
                    directory,
                    dtype=wanted,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are in the report, which is checked
                    local_files_only=True,
                    trust_remote_code=False,
                    **form,
                )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UnsupportedModel(f"{directory}: the weights cannot be loaded: {_first_sentence(error)}") from error
    if stored is not None:
        read = read_quantized(model, directory, stored, share, partial(progress.track, "quantized weights"))
        report["unexpected_keys"] = set(report["unexpected_keys"]) - read
    if (encoder := encoder_of(config)) is not None:
        _settle_encoder(model, encoder, report, has_head=is_classifier(config.to_dict()))
    if is_part:
        report["unexpected_keys"] = {name for name in report["unexpected_keys"] if not reads_other_inputs(name)}
    unexpected = set(report["unexpected_keys"])
    report["unexpected_keys"] = unexpected - tensors_of_heads(config, unexpected).keys()
    _ensure_complete(directory, report)
    if dtype == "auto" and _is_emulated(model.dtype, device):  # the config did not name the dtype
        model, chosen = model.float(), torch.float32
    if chosen is not None:
        saved = getattr(config, "dtype", None) or "half precision"
        logger.warning(
            "computing in float32: this processor has no instructions for the checkpoint's %s and would emulate it, "
            "several times slower; weights and KV take twice the bytes (model.dtype overrides this)",
            str(saved).removeprefix("torch."),
        )
    elif _is_emulated(model.dtype, device):
        logger.warning("model.dtype = %s is emulated on this processor, several times slower than float32", dtype)
    _freeze_rope(model)
    _freeze_cutoffs(model)
    # Other outputs that a config may request would only cost memory, and a tuple has no `.logits`.
    model.config.return_dict = True
    model.config.output_hidden_states = model.config.output_attentions = False
    return model.to(device)


def _size_of(directory: Path) -> str:
    """Return the size of the checkpoint's files, in words."""
    files = (path for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB"


def _widened(config: PretrainedConfig, dtype: str, device: torch.device) -> torch.dtype | None:
    """Return float32 if "auto" stands for it, because `device` would emulate the checkpoint's dtype; else None."""
    return torch.float32 if dtype == "auto" and _is_emulated(getattr(config, "dtype", None), device) else None


def itemsize_of(config: PretrainedConfig, dtype: str, device: torch.device) -> int:
    """Return the bytes of an element of the weights as they are served."""
    saved = getattr(config, "dtype", None) or torch.float32
    named = saved if dtype == "auto" else dtype
    chosen = _widened(config, dtype, device) or (getattr(torch, named) if isinstance(named, str) else named)
    return int(chosen.itemsize)


def weights_digest(model: PreTrainedModel, quantization: str) -> str:
    """Return a digest of SAMPLES values of every weight, and of the quantization that follows.

    Two checkpoints of one shape, such as a model and a fine-tune of it, have different ones.
    """
    digest = blake2b(quantization.encode(), digest_size=8)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + _samples(parameter))
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = module.quantized
            digest.update(f"{name} {weight.coding} {weight.shape}".encode() + _samples(weight.codes))
            digest.update(_samples(weight.scales))
    return digest.hexdigest()


def _samples(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().flatten()
    samples = values[:: max(1, values.numel() // SAMPLES)][:SAMPLES].contiguous().cpu()
    return samples.view(torch.uint8).numpy().tobytes()


def read_config(directory: Path) -> PretrainedConfig:
    """Read and check a checkpoint's config, without its weights. Raises UnsupportedModel.

    The start of a server has checked the file (`serving.checkpoint_files`); here transformers' defaults are checked
    with it.
    """
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(
            f"model.path = {str(directory)!r} holds no config.json; give the local folder of a transformers checkpoint."
        )
    try:
        config = served_config(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{directory / 'config.json'} cannot be read: {_first_sentence(error)}") from error
    if (refusal := refusal_of_config(config.to_dict())) is not None:
        raise UnsupportedModel(refusal)
    return config


def _is_part_of(directory: Path, config: PretrainedConfig) -> bool:
    """Return whether `config` is that of a part of the model in `directory`."""
    saved = json.loads((directory / "config.json").read_bytes())
    return bool(saved["model_type"] != config.model_type)


def rope_parameters_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary embeddings' parameters, one set for each kind of layer."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [part for part in found.values() if isinstance(part, dict)] or [found]


def max_positions(config: PretrainedConfig) -> int:
    """Return the length up to which a position's rotary embedding does not depend on the other sequences."""
    config = config.get_text_config()
    limits = [config.max_position_embeddings]
    for rope in rope_parameters_of(config):
        if rope.get("rope_type") in SWITCHING_ROPES:
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or limits[0])
    return int(min(limits))


def _freeze_rope(model: PreTrainedModel) -> None:
    """Keep the factors that the model was built with, which are those of short sequences. Then no forward derives them
    from the batch.

    transformers' rotary modules ask `rope_type` before they update their factors; "default" never updates.
    """
    recomputes = family_of(model.config).recomputes_rope
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if recomputes and kind is not None:
            _keep_factors(module)
        if isinstance(kind, str) and kind in SWITCHING_ROPES:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {layer: "default" if k in SWITCHING_ROPES else k for layer, k in kind.items()}


def _keep_factors(rotary: Any) -> None:
    """Give a rotary module of a family that `recomputes_rope` the factors that it was built with, and the scale of
    short sequences. A CUDA graph cannot contain values that a forward computes on the host.
    """
    rope = rotary.config.rope_parameters
    if rope["rope_type"] in SWITCHING_ROPES:
        rotary.attention_scaling = rope["short_mscale"]
        rotary.config = SimpleNamespace(rope_parameters=rope | {"rope_type": "default"})
    rotary.rope_init_fn = lambda _config: (rotary.inv_freq, rotary.attention_scaling)


def _freeze_cutoffs(model: PreTrainedModel) -> None:
    """Let gates that keep their largest outputs read the normal quantile of their share as a number.

    transformers computes it on the host in every forward, which a CUDA graph cannot contain.
    """
    for module in model.modules():
        if (share := getattr(module, "activation_sparsity", 0.0)) > 0.0:
            quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share)).to(model.dtype)
            module._gaussian_topk = partial(_above_cutoff, float(quantile))


def _above_cutoff(quantile: float, inputs: torch.Tensor) -> torch.Tensor:
    """Return `inputs` `[..., n]` less the value that a normal distribution of their mean and deviation has at
    `quantile`, and zero below it."""
    mean, deviation = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return (inputs - (mean + deviation * quantile)).relu()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Read generation_config.json, as vLLM does; values that are not valid in a request are ignored."""
    try:
        saved = json.loads((directory / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return SamplingDefaults()
    if not isinstance(saved, dict):
        return SamplingDefaults()
    return SamplingDefaults.valid(saved)


def _settle_encoder(model: PreTrainedModel, encoder: Encoder, report: dict[str, Any], *, has_head: bool) -> None:
    """Allow an encoder's checkpoint the heads of other tasks, and the absence of a head unless `has_head`.

    The weights before a head are never read if the checkpoint lacks them (`BaseDescription.lacks_transform`). They are
    zero instead of random, so that engines of one checkpoint are equal.
    """
    optional = () if has_head else tuple(f"{name}." for name in (*encoder.head, encoder.transform) if name)
    for name in [name for name in report["missing_keys"] if name.startswith(optional)]:
        report["missing_keys"].discard(name)
        model.get_parameter(name).data.zero_()
    report["unexpected_keys"] = {name for name in report["unexpected_keys"] if not OTHER_HEADS.match(name)}


def _ensure_complete(directory: Path, report: dict[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    transformers leaves tied weights out of its report.
    """
    mismatched = [name if isinstance(name, str) else name[0] for name in report["mismatched_keys"]]
    for names, problem in (
        (report["missing_keys"], "lacks weights that its config.json asks for"),
        (mismatched, "has weights of other shapes than its config.json asks for"),
        (
            [name for name in report["unexpected_keys"] if not LEFTOVERS.search(name)],
            "has weights for which its config.json has no place",
        ),
    ):
        if names:
            raise UnsupportedModel(
                f"{directory} {problem}: {_some(names)}. Give the complete checkpoint of a language model "
                f"with the config.json it was saved with."
            )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + rest


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def _is_emulated(dtype: torch.dtype | str | None, device: torch.device) -> bool:
    """Return True if `device` is a CPU that computes with `dtype` by converting every operand."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return device.type == "cpu" and dtype in HALF and not multiplies_in_hardware(dtype)


class LoadingProgress:
    """Reports the progress of loading one model. Each stage iterates over the model's parts."""

    def __init__(
        self,
        model: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream`: the stream on which the line changes, if it is a terminal; None: stderr."""
        self._model = model
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._next_at = self._began + FIRST_AFTER_S
        self._has_said = False

    @classmethod
    def silent(cls) -> LoadingProgress:
        """Return an instance that reports nothing: for the ranks above 0, and for models that are not served."""
        progress = cls("")
        progress._next_at = float("inf")
        return progress

    def track(self, stage: str, items: Collection[Item]) -> Iterator[Item]:
        """Iterate over `items`, which take similar work, and report the number done."""
        for done, item in enumerate(items):
            self._report(stage, done / len(items))
            yield item

    @contextmanager
    def of_transformers(self, stage: str) -> Iterator[None]:
        """Report the weights that transformers loads on this thread within the context. Its hook is the whole
        process's."""

        def hook(factory: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if keywords.get("desc") == "Loading weights":
                return self.track(stage, args[0])
            return factory(*args, **keywords)

        before = set_tqdm_hook(hook)
        try:
            yield
        finally:
            set_tqdm_hook(before)

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Remove the line; if anything was reported, log the time that loading took."""
        if not self._has_said:
            return
        self._draw("")
        if failure is None:
            logger.info("loaded %s in %.1f s", self._model, self._clock() - self._began)

    def _report(self, stage: str, share: float) -> None:
        now = self._clock()
        if now < self._next_at:
            return
        self._has_said = True
        text = f"loading {self._model}: {stage}, {share:.0%}, {now - self._began:.0f} s"
        if self._stream.isatty():
            self._draw(text)
            self._next_at = now + REDRAW_EVERY_S
        else:
            logger.info(text)
            self._next_at = now + LOG_EVERY_S

    def _draw(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
