"""Choice of the format of a base's unquantized linears, by measurement on this machine.

One format serves all linears of a base, because one linear in another format would take every layer out of the one call
(`decoder_layer`). The choice has three steps:

1. Each format multiplies samples of the base's weights by few and by many rows. The formats take turns, and the least
   time of several rounds counts, because other work on the machine can only add to a time.
2. The formats are ordered by these times. A format that C++ does not read must be faster by MARGIN.
3. The first format whose result for a row is the same for any number of rows is chosen. oneDNN's and torch's own
   products fail for some shapes on some processors.

The result is kept in a file for the next start, under a name that changes with everything that the times depend on. A
file of the same machine also gives the ranks, and the engines that start later, the same format.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import msgspec
import torch

from loramux_kernels.native.compiler import cache_directory, processor_facts
from loramux_kernels.native.loader import native_library
from loramux_kernels.packed_linear import FORMATS, UnquantizedFormat, formats_of

logger = logging.getLogger(__name__)

ROWS = (1, 16, 256)
"""Rows of the measured steps: one answer, a batch of answers, a part of a prompt. Each weighs the same."""
MARGIN = 1.25
"""Times as fast that a format must be whose layers run as modules instead of in one call. Without the one call, a
decode step of a 0.5B model took 1.4 times as long with the same products."""
CHECKED_ROWS = (1, 2, 3, 7, 16, 33, 64)
"""Numbers of rows whose results are compared with those of the last of ROWS."""

SECONDS = 1.0
"""Time for measuring, after which no further round begins."""
MIN_ROUNDS, MAX_ROUNDS = 2, 7
MAX_SHAPES = 8
"""Shapes that are measured, those with most weights first."""
TIMED_WEIGHTS, CHECKED_WEIGHTS = 1 << 21, 1 << 23
"""Maximum number of weights of a sample. Larger linears are cut to fewer outputs: sums go over inputs."""
UNCACHED_BYTES = 64 << 20
"""Bytes of samples that take turns, so that a step's weights come from memory and not from a cache."""
BANDWIDTH_BYTES = 256 << 20
WORTH_MEASURING = 64 << 20
"""Bytes of a base's linears below which nothing is measured."""


class LinearsShape(NamedTuple):
    """Linears of one shape: members that read the same input are one linear."""

    in_features: int
    out_features: int
    number: int

    @property
    def num_weights(self) -> int:
        """Elements of all weights of this shape."""
        return self.in_features * self.out_features * self.number


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the formats with the linears of one base on this machine."""

    machine: str
    """Description of everything that the times depend on."""
    seconds: dict[str, tuple[float, ...]] = {}
    """Seconds of all linears of the base, by format, for each of ROWS."""
    refused: dict[str, str] = {}
    """Formats before the best one whose result for a row depends on the number of rows, with the reason."""
    bandwidth: float = 0.0
    """Bytes per second that the threads read from memory."""


class FormatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a base's linears, and the reason."""

    name: str | None
    """Name in FORMATS; None: each linear gets the first format that holds it."""
    reason: str
    gflops: float | None = None
    """10^9 operations per second of all linears together with the most of ROWS."""
    bandwidth: float | None = None
    """Bytes per second that the threads read from memory."""

    @property
    def form(self) -> type[UnquantizedFormat] | None:
        """The format; None: each linear gets the first format that holds it."""
        return None if self.name is None else FORMATS[self.name]


class FormatUnavailable(ValueError):
    """This machine cannot multiply by the format that the settings name."""


def choose_for_base(
    shapes: Sequence[LinearsShape], dtype: torch.dtype, wanted: str = "auto", *, is_quantized: bool = False
) -> FormatChoice:
    """Return the format for a base's linears on a CPU, and log it.

    `wanted` is auto (a kept measurement serves), measure (measure in any case), or the name of a format. Raises
    FormatUnavailable. If the base is quantized, only the memory's bandwidth is measured.
    """
    possible = formats_of(torch.empty(2, 2, dtype=dtype))
    forced = None if wanted in ("auto", "measure") else wanted
    if forced is not None and forced not in possible:
        raise FormatUnavailable(f"{forced} does not multiply {dtype} here; this machine has {', '.join(possible)}")
    if sum(shape.num_weights for shape in shapes) * dtype.itemsize < WORTH_MEASURING and wanted != "measure":
        name = None if is_quantized else forced or possible[0]
        return FormatChoice(name=name, reason="the base is small, and not measured")
    measured = kept_or_measured([] if is_quantized else shapes, dtype, anew=wanted == "measure")
    if is_quantized:
        return FormatChoice(name=None, reason="the base is quantized", bandwidth=measured.bandwidth)
    choice = choose(measured, shapes, forced)
    logger.info("linears in the format %s: %s", choice.name, choice.reason)
    refused = dict(measured.refused)
    if forced is not None and (reason := dependence_of(FORMATS[forced], shapes, dtype)) is not None:
        refused[forced] = reason
    for name, reason in refused.items():
        if name == choice.name:
            logger.warning("answers may depend on their neighbours in the format %s: %s", name, reason)
        else:
            logger.info("the format %s is not offered: %s", name, reason)
    return choice


def choose(measured: Measurement, shapes: Sequence[LinearsShape], forced: str | None = None) -> FormatChoice:
    """Return the best format of a measurement, or the `forced` one."""
    order = ordered(measured.seconds)
    best = next((name for name in order if name not in measured.refused), order[0])
    name = forced or best
    if forced is not None:
        reason = "as engine.linear_format says"
    elif len(order) == 1:
        reason = "the only format of this machine"
    elif best in measured.refused:
        reason = "the fastest; no format keeps a row's result independent of the number of rows"
    else:
        reason = "the fastest" if name == min(order, key=measured.seconds.__getitem__) else "the best"
    times = "; ".join(f"{one} {_milliseconds(seconds)}" for one, seconds in measured.seconds.items())
    operations = 2 * ROWS[-1] * sum(shape.num_weights for shape in shapes)
    seconds = measured.seconds.get(name)
    return FormatChoice(
        name=name,
        reason=f"{reason} ({times} for {', '.join(map(str, ROWS))} rows)",
        gflops=None if seconds is None else operations / seconds[-1] / 1e9,
        bandwidth=measured.bandwidth,
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * one:.2f}" for one in seconds) + " ms"


def ordered(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of formats from the best to the worst."""

    def cost(name: str) -> float:
        return geometric_mean(seconds[name]) * (1.0 if FORMATS[name].is_read_by_layers else MARGIN)

    return sorted((name for name in FORMATS if name in seconds), key=cost)


def row_dependence(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str | None:
    """Return how the product of a row of `x` depends on the number of rows; None if it does not."""
    whole = multiply(x)
    for number in CHECKED_ROWS:
        rows = slice(len(x) - number, len(x)) if number % 2 else slice(number)
        if not torch.equal(multiply(x[rows].clone()), whole[rows]):
            shape = f"{x.shape[1]} inputs and {whole.shape[1]} outputs"
            return f"with {shape}, a row's result among {number} rows is not its result among {len(x)}"
    return None


def kept_or_measured(shapes: Sequence[LinearsShape], dtype: torch.dtype, *, anew: bool = False) -> Measurement:
    """Return the measurement that an earlier start kept, or measure and keep the result.

    Processes that start together wait for each other: they would disturb each other's measurements.
    """
    shapes = sorted(shapes, key=lambda shape: (-shape.num_weights, shape))[:MAX_SHAPES]
    machine = describe_machine(shapes, dtype)
    path = cache_directory() / f"formats-{sha256(machine.encode()).hexdigest()[:24]}.json"
    with _lock(path.with_name("formats.lock")):
        if not anew and (kept := _read(path)) is not None and kept.machine == machine:
            logger.debug("formats of linears: %s", path)
            return kept
        measured = measure(machine, shapes, dtype)
        _keep(path, measured)
    return measured


def describe_machine(shapes: Sequence[LinearsShape], dtype: torch.dtype) -> str:
    """Return everything that the times depend on: processor, libraries, threads, and the linears' shapes."""
    library = native_library()
    facts = {
        "processor": processor_facts().decode(errors="replace"),
        "architecture": platform.machine(),
        "torch": str(torch.__version__),
        "operators": None if library is None else str(library._name),  # the folder is a digest of sources and flags
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "shapes": [tuple(shape) for shape in shapes],
        "rows": ROWS,
    }
    return msgspec.json.encode(facts, order="sorted").decode()


def measure(machine: str, shapes: Sequence[LinearsShape], dtype: torch.dtype) -> Measurement:
    """Measure the formats that hold weights of `dtype`, and the memory's bandwidth."""
    began = time.perf_counter()
    bandwidth = read_bandwidth()
    seconds: dict[str, tuple[float, ...]] = {}
    refused: dict[str, str] = {}
    if shapes:
        forms = {name: FORMATS[name] for name in formats_of(_weight(shapes[0], 1, dtype))}
        with torch.inference_mode():
            seconds = _times(forms, shapes, dtype)
            for name in ordered(seconds):
                if (reason := dependence_of(forms[name], shapes, dtype)) is None:
                    break
                refused[name] = reason
    logger.info("formats of linears measured in %.1f s", time.perf_counter() - began)
    return Measurement(machine=machine, seconds=seconds, refused=refused, bandwidth=bandwidth)


def read_bandwidth(num_bytes: int = BANDWIDTH_BYTES, tries: int = 5) -> float:
    """Return the bytes per second of a sum over `num_bytes` of memory; the best of `tries`."""
    data = torch.ones(num_bytes // 4)
    return num_bytes / min(_seconds(data.sum) for _ in range(tries))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _times(
    forms: Mapping[str, type[UnquantizedFormat]], shapes: Sequence[LinearsShape], dtype: torch.dtype
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of all linears, by format, for each of ROWS."""
    samples = [_weight(shape, TIMED_WEIGHTS, dtype) for shape in shapes]
    factors = [shape.num_weights / sample.numel() for shape, sample in zip(shapes, samples, strict=True)]
    turns = math.ceil(UNCACHED_BYTES / (len(forms) * sum(sample.nbytes for sample in samples)))
    copies = [min(turns, shape.number) for shape in shapes]
    held = {
        name: [[form([sample], None) for _ in range(n)] for sample, n in zip(samples, copies, strict=True)]
        for name, form in forms.items()
    }
    inputs = [_rows(sample, ROWS[-1]) for sample in samples]
    best = {name: [[math.inf] * len(ROWS) for _ in shapes] for name in forms}
    deadline = time.perf_counter() + SECONDS
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for place, rows in enumerate(ROWS):
            for shape, x in enumerate(inputs):
                for name, linears in held.items():
                    multiply = partial(linears[shape][number % copies[shape]], x[:rows])
                    best[name][shape][place] = min(best[name][shape][place], _seconds(multiply))
    return {
        name: tuple(
            sum(f * times[place] for f, times in zip(factors, taken, strict=True)) for place in range(len(ROWS))
        )
        for name, taken in best.items()
    }


def dependence_of(form: type[UnquantizedFormat], shapes: Sequence[LinearsShape], dtype: torch.dtype) -> str | None:
    """Return how the products of `form` with weights of these shapes depend on the number of rows; None if they do
    not.

    Each product of an input and a weight has its negative at another place of the same sum. So the results are rounding
    errors alone, and another order of the sum, which a rounded result would mostly hide, changes nearly all of them.
    """
    generator = torch.Generator().manual_seed(2)
    for shape in shapes:
        weight = _weight(shape, CHECKED_WEIGHTS, dtype)
        x = _rows(weight, ROWS[-1])
        places = torch.randperm(shape.in_features, generator=generator)
        half = len(places) // 2
        one, other, alone = places[:half], places[half : 2 * half], places[2 * half :]
        weight[:, other], x[:, other], x[:, alone] = -weight[:, one], x[:, one], 0
        if (reason := row_dependence(form([weight], None), x)) is not None:
            return reason
    return None


def _weight(shape: LinearsShape, most: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random weights of this shape, with fewer outputs if it has more than `most` weights."""
    columns = min(shape.out_features, max(32, most // shape.in_features // 32 * 32))
    noise = torch.randn(min(columns * shape.in_features, 1 << 20), generator=torch.Generator().manual_seed(0)).to(dtype)
    count = columns * shape.in_features
    values = noise.repeat(-(-count // len(noise)))[:count]
    return values.view(columns, shape.in_features) * shape.in_features**-0.5


def _rows(weight: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, weight.shape[1], generator=generator).to(weight.dtype)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of this machine's measurements; without a folder to write to, hold none."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Measurement | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measurement)
    except (OSError, msgspec.DecodeError):
        return None
    is_whole = all(len(seconds) == len(ROWS) and min(seconds) > 0.0 for seconds in found.seconds.values())
    return found if is_whole and found.seconds.keys() <= FORMATS.keys() else None


def _keep(path: Path, measured: Measurement) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(measured))
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("formats of linears will be measured again at the next start: %s", error)
