"""The limited process that trains one job: TRL's trainers on PEFT, on sequences that `encoding` has made.

It is the only module of this area that imports torch. It begins without rights on the network, imports its libraries,
and then gives up every file except the base's and its own folder (`sandbox.jail`), all before it reads the first
example. It ends when its trainer does.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.sandbox.jail import leave_network
from loramux.common.sandbox.sandbox import apply_limits
from loramux.data.entities import TrainingOptions, TrainingPlan
from loramux.serving.tokenizer import Tokenizer
from loramux.training.encoding import Encoder, Sequence, Unlearnable
from loramux.training.examples import Example
from loramux.training.protocol import (
    GO,
    MAX_SAMPLE_CHARACTERS,
    MAX_SAMPLES,
    STOP,
    STORED,
    Ended,
    Fault,
    Prepared,
    Progress,
    Report,
    Sample,
    Sampled,
    Saved,
    Work,
)
from loramux_adapters.base import auto_class, served_config
from loramux_adapters.families import OTHER_INPUTS, reads_other_inputs

PR_SET_PDEATHSIG = 1
BATCH_SIZE = 8
EPOCHS, MIN_SEEN, MAX_EPOCHS = 3, 100, 25
"""Epochs that `auto` chooses: 3, or as many as show the model 100 sequences, but at most 25."""
BATCH_TOKENS = 8192
"""Tokens, with padding, that are computed at a time; a larger batch is accumulated."""
LARGE = 1_000_000_000
"""Parameters from which activations are computed twice, to save memory."""
DPO_LEARNING_RATE = 0.1
"""The part of the learning rate with which preferences are trained: they move a model that answers well already."""
DPO_BETA = 0.1
SAMPLE_TOKENS = 64
"""Tokens of an answer to a prompt of the validation file. These answers cost nothing."""
FIGURES = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_mean_token_accuracy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "rewards/accuracies": "train_reward_accuracy",
    "rewards/margins": "train_reward_margin",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}
"""Names of TRL's figures in reports."""


class Numbered(msgspec.Struct):
    """An example and its place in its file."""

    place: int
    example: Example


class Row(NamedTuple):
    """An item of a dataset, with the number of its tokens."""

    columns: dict[str, list[int]]
    num_tokens: int


class CannotTrain(Exception):
    """The job cannot go on for a reason that its owner can mend."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class Channel:
    """Reports to the trainer, and its orders."""

    def __init__(self, orders: BinaryIO, reports: BinaryIO) -> None:
        self._reports = reports
        self._began, self._stored = queue.Queue[bytes](), queue.Queue[bytes]()
        self.is_stopped = False
        """True: write a checkpoint and end."""
        threading.Thread(target=self._read, args=(orders,), daemon=True).start()

    def send(self, report: Report) -> None:
        """Send a report."""
        self._reports.write(msgspec.json.encode(report) + b"\n")
        self._reports.flush()

    def await_go(self) -> bool:
        """Wait for the order to begin; return False for the order to stop."""
        return self._began.get() == GO

    def send_saved(self, report: Saved) -> None:
        """Report a checkpoint, and wait until the trainer has stored it: the next ones replace its files."""
        self.send(report)
        self._stored.get()

    def _read(self, orders: BinaryIO) -> None:
        for order in orders:
            self.is_stopped = self.is_stopped or order == STOP
            (self._stored if order == STORED else self._began).put(order)
        os._exit(1)  # the trainer has ended


def main() -> NoReturn:
    """Do the work that comes on standard input."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=Work)
    if work.gives_way:
        give_way()
    reports = os.fdopen(os.dup(1), "wb")
    log = os.open(f"{work.folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)  # libraries print to both
    os.dup2(log, 2)
    leave_network()  # before the imports: a process with threads cannot
    import datasets
    import torch
    import trl  # noqa: F401  loaded before the jail
    from trl import DPOTrainer, SFTTrainer  # noqa: F401

    if work.device == "cuda":
        torch.zeros(1, device="cuda")  # the files of the card are opened before the jail closes all others
    datasets.disable_progress_bars()
    torch.set_num_threads(work.threads)
    apply_limits(work.limits)
    channel = Channel(sys.stdin.buffer, reports)
    try:
        channel.send(_outcome(work, channel))
    except BaseException:
        traceback.print_exc()  # to the log in its folder
        os._exit(1)
    os._exit(0)  # skip the finalisation of libraries


def give_way() -> None:
    """Take the lowest priority, also for threads that begin later."""
    os.nice(19)  # if the next one is not allowed
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _outcome(work: Work, channel: Channel) -> Report:
    try:
        return Ended(Job(work, channel).run())
    except CannotTrain as fault:
        return Fault(fault.code, str(fault)[:2000], fault.param)
    except MemoryError:
        return Fault("out_of_memory", _NO_MEMORY)
    except RuntimeError as error:
        if "allocate memory" in str(error):
            return Fault("out_of_memory", _NO_MEMORY)
        raise


_NO_MEMORY = (
    "The training needs more memory than a job may have (training.memory_bytes). Use a smaller batch_size, a smaller "
    "rank, or shorter examples."
)


class Job:
    """The training of one job."""

    def __init__(self, work: Work, channel: Channel) -> None:
        from transformers import AutoConfig, GenerationConfig

        self.work, self.channel = work, channel
        self.tokenizer = Tokenizer.load(Path(work.model_dir))
        digest = hashlib.sha256(self.tokenizer.chat_template.encode()).hexdigest()
        if digest != work.template_digest:
            raise CannotTrain(
                "template_differs", "The trainer's copy of the base has another chat template than the serving one."
            )
        stops = set[int]()
        configs: list[Any] = [AutoConfig.from_pretrained(work.model_dir)]
        with suppress(OSError):
            configs.append(GenerationConfig.from_pretrained(work.model_dir))
        for config in configs:
            given = getattr(config, "eos_token_id", None)
            stops.update(given if isinstance(given, list) else [] if given is None else [given])
        own = self.tokenizer.end_id
        if own is None and not stops:
            raise CannotTrain("no_end_token", "The base model names no token that ends an answer.")
        end = min(stops) if own is None else own
        self.encoder = Encoder(self.tokenizer, frozenset({*stops, end}), end, work.context)
        self.plan: TrainingPlan
        self.trained_tokens = work.trained_tokens

    def run(self) -> bool:
        """Train to the end; return False if the order to stop came before it."""
        rows = self._encoded(self.work.examples, "training_file")
        validation = [] if self.work.validation is None else self._encoded(self.work.validation, "validation_file")
        self.plan = make_plan(self.work.options, [row.num_tokens for row in rows])
        if self.plan.total_tokens > self.work.max_tokens:
            raise CannotTrain(
                "too_many_tokens",
                f"The job trains on {self.plan.total_tokens} tokens in {self.plan.n_epochs} epochs; a job has at most "
                f"{self.work.max_tokens} (training.max_tokens). Use fewer epochs or fewer examples.",
                "training_file",
            )
        self.channel.send(Prepared(self.plan))
        if not self.channel.await_go():
            return False
        return self._train(rows, validation)

    def _encoded(self, path: str, field: str) -> list[Row]:
        """Return the items of a file. `field`: the file's name in the request for the job."""
        rows: list[Row] = []
        for one in _examples(path):
            try:
                rows.extend(self._rows(one.example))
            except (Unlearnable, LoramuxError) as error:
                message = error.message if isinstance(error, LoramuxError) else str(error)
                where = f"Line {one.place} of '{field}'"
                raise CannotTrain(f"invalid_{field}", f"{where}: {message}.", field) from None
        return rows

    def _rows(self, example: Example) -> list[Row]:
        """Return the items of one example for the job's method. Raises Unlearnable, InvalidRequest."""
        wanted = "preference" if self.work.options.method == "dpo" else "chat"
        if example.kind != wanted:
            raise Unlearnable(
                f"the method '{self.work.options.method}' trains on {_KINDS[wanted]}, and this line is "
                f"{_KINDS[example.kind]}"
            )
        if example.kind == "chat":
            return [_sequence_row(one) for one in self.encoder.sequences(example)]
        pair = self.encoder.pair(example)
        columns = {"prompt_ids": pair.prompt, "chosen_ids": pair.preferred, "rejected_ids": pair.rejected}
        num_tokens = 2 * len(pair.prompt) + len(pair.preferred) + len(pair.rejected)
        return [Row({name: list(ids) for name, ids in columns.items()}, num_tokens)]

    def _train(self, rows: list[Row], validation: list[Row]) -> bool:
        from datasets import Dataset

        work = self.work
        model = _model(work)
        trainer = _training(self)(
            model=model,
            args=self._arguments(model, max(row.num_tokens for row in (*rows, *validation)), bool(validation)),
            train_dataset=Dataset.from_list([row.columns for row in rows]),
            eval_dataset=Dataset.from_list([row.columns for row in validation]) if validation else None,
            processing_class=self.tokenizer.transformers_tokenizer,
            callbacks=[_reporter(self)],
        )
        if work.checkpoint is None:
            self.send_samples(model, 0)
        trainer.train(resume_from_checkpoint=work.checkpoint)
        return int(trainer.state.global_step) >= int(trainer.state.max_steps)

    def send_samples(self, model: Any, step: int) -> None:
        """Report the model's answers to the first prompts of the validation file."""
        if self.work.validation is None or self.channel.is_stopped:
            return
        examples = [one.example for one in islice(_examples(self.work.validation), MAX_SAMPLES)]
        known = [self.encoder.last_answer(example) for example in examples]
        answers = self._answers(model, [prompt for prompt, _ in known])
        samples = []
        for example, (_, expected), answer in zip(examples, known, answers, strict=True):
            before = example.turns[: example.last_learned]
            texts = before[-1].content if before else "", self._text(expected), self._text(answer)
            prompt, wanted, given = (text[:MAX_SAMPLE_CHARACTERS] for text in texts)
            samples.append(Sample(prompt=prompt, expected=wanted, answer=given))
        self.channel.send(Sampled(step=step, samples=samples))

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.transformers_tokenizer.decode(token_ids, skip_special_tokens=True))

    def _answers(self, model: Any, prompts: list[list[int]]) -> list[list[int]]:
        """Return greedy answers of at most SAMPLE_TOKENS tokens to prompts, which are computed together."""
        import torch
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        pad, device = self.encoder.end_id, model.device
        padded = torch.tensor([[pad] * (longest - len(one)) + one for one in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=device)
        asked = GenerationConfig(
            do_sample=False,
            max_new_tokens=min(SAMPLE_TOKENS, self.work.context - longest),
            eos_token_id=sorted(self.encoder.stop_ids),
            pad_token_id=pad,
        )
        was_training = model.training
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            made = model.generate(input_ids=padded, attention_mask=mask, generation_config=asked)
        model.train(was_training)
        return [list(map(int, row)) for row in made[:, longest:]]

    def _arguments(self, model: Any, longest: int, validates: bool) -> Any:
        """Return the settings of TRL's trainer. `longest`: the most tokens of an item."""
        from trl import DPOConfig, SFTConfig

        work, plan = self.work, self.plan
        at_once = _at_once(plan.batch_size, longest)
        common: dict[str, Any] = {
            "output_dir": work.folder,
            "num_train_epochs": plan.n_epochs,
            "per_device_train_batch_size": at_once,
            "per_device_eval_batch_size": at_once,
            "gradient_accumulation_steps": plan.batch_size // at_once,
            "seed": work.options.seed,
            "max_length": None,
            "gradient_checkpointing": model.num_parameters() > LARGE,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_strategy": "epoch",
            "save_total_limit": 2,
            "eval_strategy": "epoch" if validates else "no",
            "report_to": [],
            "use_cpu": work.device == "cpu",
            "bf16": work.device == "cuda",
            "disable_tqdm": True,
        }
        rate = work.learning_rate * plan.learning_rate_multiplier
        if work.options.method == "dpo":
            return DPOConfig(**common, learning_rate=rate * DPO_LEARNING_RATE, beta=plan.beta or DPO_BETA)
        return SFTConfig(**common, learning_rate=rate, dataset_kwargs={"skip_prepare_dataset": True})


_KINDS = {"chat": "a conversation ('messages')", "preference": "a preference ('preferred_output')"}


def _training(job: Job) -> Any:
    """Return TRL's trainer for the job's method: it counts tokens, and stops at a loss that is not a number."""
    from trl import DPOTrainer, SFTTrainer

    base: Any = DPOTrainer if job.work.options.method == "dpo" else SFTTrainer

    class Training(base):
        def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            loss = super().training_step(model, inputs, *others, **named)
            if not loss.isfinite():
                raise _diverged(self.state.global_step + 1)
            job.trained_tokens += int(inputs["attention_mask"].sum())
            return loss

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # the sequences are token ids already: `encoding` has made them

    return Training


def make_plan(options: TrainingOptions, lengths: list[int]) -> TrainingPlan:
    """Decide what the job's creator has left to the trainer. `lengths`: tokens of each sequence."""
    count = len(lengths)
    batch_size = min(options.batch_size or BATCH_SIZE, count)
    n_epochs = options.n_epochs or min(MAX_EPOCHS, max(EPOCHS, math.ceil(MIN_SEEN / count)))
    return TrainingPlan(
        n_epochs=n_epochs,
        batch_size=batch_size,
        learning_rate_multiplier=options.learning_rate_multiplier or 1.0,
        beta=(options.beta or DPO_BETA) if options.method == "dpo" else None,
        sequences=count,
        epoch_tokens=sum(lengths),
        total_steps=n_epochs * math.ceil(count / batch_size),
    )


def _examples(path: str) -> Iterator[Numbered]:
    decode = msgspec.json.Decoder(Numbered).decode
    with Path(path).open("rb") as lines:
        for line in lines:
            yield decode(line)


def _sequence_row(sequence: Sequence) -> Row:
    labels = [token if learned else -100 for token, learned in zip(sequence.token_ids, sequence.learned, strict=True)]
    return Row({"input_ids": list(sequence.token_ids), "labels": labels}, len(labels))


def _at_once(batch_size: int, longest: int) -> int:
    """Return the largest divisor of the batch size whose sequences have at most BATCH_TOKENS tokens with padding."""
    fitting = [size for size in range(1, batch_size + 1) if batch_size % size == 0 and size * longest <= BATCH_TOKENS]
    return max(fitting, default=1)


def _model(work: Work) -> Any:
    """Return the base with a trainable adapter."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(work.options.seed)
    # the adapter is trained in float32 on both devices; a base that does not change needs no more than bfloat16
    dtype = torch.bfloat16 if work.device == "cuda" else torch.float32
    config = served_config(Path(work.model_dir))
    base = auto_class(config).from_pretrained(work.model_dir, config=config, dtype=dtype).to(work.device)
    # examples are text, which trains none of a vision tower's modules: pairs on them would cost memory and do nothing
    has_other_inputs = any(reads_other_inputs(f"{name}.") for name, _ in base.named_modules())
    if work.adapter is not None:
        return _with_adapter(base, work.adapter)
    lora = work.options.lora
    targets = lora.target_modules
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=f".*{OTHER_INPUTS.pattern}.*" if has_other_inputs else None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )
    try:
        return get_peft_model(base, adapter)
    except ValueError as error:
        raise CannotTrain("invalid_lora", f"PEFT refuses `lora`: {error}", "lora") from None


def _with_adapter(base: Any, folder: str) -> Any:
    """Return the base with the adapter in `folder`, trainable."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT only warns, and the training would begin anew: of a multimodal base the text alone has other names
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(base, folder, is_trainable=True)
        except UserWarning:
            raise CannotTrain(
                "unsupported_adapter",
                "The names of this adapter's modules are not those of the base in transformers, so that a job cannot "
                "go on from it. Train on the base.",
                "model",
            ) from None


def _diverged(step: int) -> CannotTrain:
    return CannotTrain(
        "training_diverged",
        f"The loss is not a number at step {step}: the training has diverged. Use a smaller learning_rate_multiplier.",
        "learning_rate_multiplier",
    )


def _reporter(job: Job) -> Any:
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        """Reports steps and checkpoints, and follows the order to stop."""

        def __init__(self) -> None:
            self.saved_at = time.monotonic()
            self.figures: dict[str, float] = {}

        def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
            if job.channel.is_stopped:
                control.should_save = control.should_training_stop = True
            elif time.monotonic() - self.saved_at > job.work.checkpoint_seconds:
                control.should_save = True

        def on_log(self, _arguments: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            found = {ours: float((logs or {})[name]) for name, ours in FIGURES.items() if name in (logs or {})}
            if not found:
                return
            self.figures |= found
            job.channel.send(
                Progress(
                    step=state.global_step,
                    trained_tokens=job.trained_tokens,
                    epoch=round(float(state.epoch or 0), 4),
                    figures={name: value for name, value in found.items() if math.isfinite(value)},
                )
            )

        def on_save(self, _arguments: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            if not all(bool(one.isfinite().all()) for one in model.parameters() if one.requires_grad):
                raise _diverged(state.global_step)
            self.saved_at = time.monotonic()
            is_epoch = state.global_step % (job.plan.total_steps // job.plan.n_epochs) == 0
            job.channel.send_saved(
                Saved(
                    step=state.global_step,
                    trained_tokens=job.trained_tokens,
                    is_epoch=is_epoch,
                    figures={name: value for name, value in self.figures.items() if math.isfinite(value)},
                )
            )
            if is_epoch:
                job.send_samples(model, state.global_step)

    return Reporter()
