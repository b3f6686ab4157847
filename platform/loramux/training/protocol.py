"""Messages between a trainer and the limited process that trains: JSON lines, never pickles.

    trainer ── Work, then orders ──> child
    trainer <── Prepared, then Progress, Saved and Sampled, at last Ended or Fault ── child

The child trains on a customer's data, so the trainer believes nothing of its reports but bounded numbers and the files
in its own folder.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.common.sandbox.sandbox import JobLimits
from loramux.data.entities import TrainingOptions, TrainingPlan

MAX_REPORT_BYTES = 64 << 10
GO, STOP, STORED = b"go\n", b"stop\n", b"stored\n"
"""Orders: begin to train; write a checkpoint and end; go on after a checkpoint, which is stored."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
STATE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
"""The files with which training goes on from a checkpoint, in addition to those of the adapter."""

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, Meta(max_length=2000)]
MAX_SAMPLES = 3
MAX_SAMPLE_CHARACTERS = 500
SampleText = Annotated[str, Meta(max_length=MAX_SAMPLE_CHARACTERS)]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A job for the child. Paths are absolute."""

    model_dir: str
    examples: str
    """JSON lines of `Example`, each with its place in the training file."""
    validation: str | None
    folder: str
    """The folder that the child may write."""
    adapter: str | None
    """The folder of the adapter that the training begins with."""
    checkpoint: str | None
    """The folder of the checkpoint from which the training goes on."""
    trained_tokens: int
    """The tokens up to this checkpoint."""
    options: TrainingOptions
    template_digest: str
    context: int
    max_tokens: int
    learning_rate: float
    checkpoint_seconds: float
    device: Literal["cpu", "cuda"]
    threads: int
    gives_way: bool
    """True: the child computes only on processors that no other process wants."""
    limits: JobLimits


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The examples are read, and the plan is made."""

    plan: TrainingPlan


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Figures of a step."""

    step: Count
    trained_tokens: Count
    epoch: float
    figures: dict[Annotated[str, Meta(max_length=64)], float]


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint is complete in the folder `checkpoint-<step>`."""

    step: Count
    trained_tokens: Count
    is_epoch: bool
    figures: dict[Annotated[str, Meta(max_length=64)], float]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of the validation file, and the model's answer to it. Long texts are shortened."""

    prompt: SampleText
    """The last message of the prompt."""
    expected: SampleText
    answer: SampleText


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """Answers of the model after a step; step 0: of the model that the training begins with."""

    step: Count
    samples: Annotated[list[Sample], Meta(max_length=MAX_SAMPLES)]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The training has ended, and its last checkpoint is saved. `is_complete`: not by the order to stop."""

    is_complete: bool


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The training cannot go on."""

    code: Text
    message: Text
    param: Text | None = None


Report = Prepared | Progress | Saved | Sampled | Ended | Fault
decode_report = msgspec.json.Decoder(Report).decode
