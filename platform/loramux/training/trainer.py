"""A trainer: a process that takes fine-tuning jobs by leases, and runs each in a limited child (`child`).

    examples ── parsed here ──> child ── Prepared ──> row: the plan; the server holds the cost, and the job runs
                                      ── Progress ──> the job's log
                                      ── Saved ──> checkpoint in the store, then its row and the tokens: one transaction
                                      ── Ended, Fault ──> row: finishing; the server registers the result and bills it

A trainer needs the database and the store, and no rights of a tenant. If it dies, its child dies with it, and the next
trainer goes on from the last checkpoint. A trainer that has lost its lease ends its child and writes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec

from loramux.batches.files import object_name
from loramux.batches.lines import open_input
from loramux.common.errors import LoramuxError
from loramux.common.identity import new_id
from loramux.common.jobs import JobRunner
from loramux.common.sandbox.sandbox import JobLimits
from loramux.common.settings.server import TrainingSettings
from loramux.common.units import SECOND
from loramux.data.entities import SAMPLES, Refusal, TrainingCheckpoint, TrainingJob
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsUnavailable
from loramux.data.records.leases import trainer_liveness
from loramux.data.records.tenants import TenantRepository
from loramux.data.records.training import (
    CANCELLED,
    FAILED,
    FINISHING,
    PAUSED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    VALIDATING_FILES,
    TrainingJobs,
)
from loramux.data.storage.blobs import BlobStore
from loramux.training.examples import ExampleFile, ExampleFormat
from loramux.training.protocol import (
    ADAPTER_FILES,
    GO,
    MAX_REPORT_BYTES,
    STATE_FILES,
    STOP,
    STORED,
    Ended,
    Fault,
    Prepared,
    Progress,
    Report,
    Sampled,
    Saved,
    Work,
    decode_report,
)
from loramux.training.share import ComputeShare

LOOK_SECONDS = 0.5
"""Seconds between two looks at a job's row, and between two looks for jobs."""
LOG_SECONDS = 1.0
"""Seconds between two estimates of a job's end."""
MAX_ATTEMPTS = 3
"""Trainers that may take a job in succession without another checkpoint of it."""
LOGGED_STEPS = 1000
"""Maximum number of steps of a job whose figures are logged."""
MAX_FILE_BYTES = 16 << 30
"""The largest file that a child may write."""
_CHILD = "from loramux.training.child import main; main()"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")

logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another trainer has the job, or it was removed."""


class ChildDied(Exception):
    """The child ended without a report of its end."""


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The parts that a trainer works with."""

    database: Database
    blobs: BlobStore
    bases: Callable[[], Awaitable[dict[str, Path]]]
    """Returns the folders of the bases' weights that are on this machine now, by the bases' names."""
    format: ExampleFormat
    settings: TrainingSettings
    share: ComputeShare


class Trainer:
    """Runs jobs. `tend` must be called periodically, while `alive` is open."""

    def __init__(self, parts: TrainerParts) -> None:
        self.id = new_id("trainer")
        self._parts = parts
        self._bases: dict[str, Path] = {}
        self.jobs = JobRunner("training", self._find, self._run)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """While the block runs, other trainers leave this one's jobs to it; then its jobs are free for others."""
        async with trainer_liveness(self._parts.database, self.id):
            try:
                yield
            finally:
                await self.jobs.stop()

    async def tend(self) -> int:
        """Take the jobs of dead trainers from them, and take waiting jobs; return the number of own jobs."""
        held = len(await self._find())
        async with self._parts.database.begin() as session:
            jobs = TrainingJobs(session)
            await jobs.release_dead(besides=self.id)
            waiting = await jobs.waiting()
        if waiting and held < self._parts.settings.jobs:
            held += await self._take(waiting, self._parts.settings.jobs - held)
        self.jobs.look()
        return held

    async def _take(self, waiting: Sequence[TrainingJob], room: int) -> int:
        """Take at most `room` of the jobs whose base is on this machine; return the number of jobs taken."""
        self._bases |= await self._parts.bases()
        taken = 0
        async with self._parts.database.begin() as session:
            for job in waiting:
                if taken < room and job.base_model in self._bases:
                    taken += await TrainingJobs(session).take(job.id, self.id) is not None
        return taken

    async def _find(self) -> Sequence[TrainingJob]:
        async with self._parts.database.read() as session:
            return await TrainingJobs(session).of_trainer(self.id)

    async def _run(self, job: TrainingJob) -> None:
        run = TrainingRun(job, self.id, self._bases[job.base_model], self._parts)
        try:
            if job.trainer_attempts > MAX_ATTEMPTS:
                await run.end(FAILED, _SERVER_FAILED)
            else:
                await run.run()
        except LeaseLost:
            logger.info("the training job %s is another trainer's now", job.id)
        except (LoramuxError, ChildDied) as error:
            logger.warning("the training job %s is tried again: %s", job.id, error)
            await run.release()
        except asyncio.CancelledError:
            await asyncio.shield(run.release())
            raise
        except Exception:
            logger.exception("the training job %s is tried again", job.id)
            await run.release()


_SERVER_FAILED = Refusal("server_failed", "The trainers failed while they ran this job. It costs nothing.")


class TrainingRun:
    """The run of one job by this trainer, from its last checkpoint on."""

    def __init__(self, job: TrainingJob, trainer_id: str, base: Path, parts: TrainerParts) -> None:
        """`base`: the folder of the base's weights."""
        self._job = job
        self._trainer_id = trainer_id
        self._base = base
        self._parts = parts
        self._database = parts.database
        self._logged_at = 0.0
        self._every = 1
        self._digests: dict[str, str] = {}
        """SHA-256 of the files of examples, by their fields in the request for the job."""
        self._began: tuple[float, int] | None = None
        """The time and the step at which this run began to train."""

    async def run(self) -> None:
        """Bring the job to its end, or to the order to stop. Raises LeaseLost, ChildDied, LoramuxError."""
        with self._parts.blobs.staging() as folder:
            try:
                work = await self._work(folder)
            except FileNotFoundError:
                await self.end(FAILED, Refusal("file_lost", "A file of the job is no longer in the store."))
                return
            except LoramuxError as error:
                if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                await self.end(FAILED, Refusal(error.code, error.message, error.field))
                return
            child = await self._start(folder)
            try:
                with self._parts.share.limiting(child):
                    await self._converse(child, work, folder)
            finally:
                if child.returncode is None:
                    child.kill()
                await child.wait()

    async def end(self, outcome: str, error: Refusal | None = None) -> None:
        """Hand the job to its server, which registers the result and bills it. Raises LeaseLost."""
        async with self._database.begin() as session:
            jobs = await self._held(TrainingJobs(session))
            why = error or self._job.error
            await jobs.change(self._job.id, state=FINISHING, outcome=outcome, error=why, trainer_id=None)

    async def release(self) -> None:
        """Leave the job to the next trainer. If the database does not answer, this trainer goes on with it."""
        with suppress(LeaseLost, RecordsUnavailable):
            async with self._database.begin() as session:
                jobs = await self._held(TrainingJobs(session))
                await jobs.change(self._job.id, trainer_id=None)

    async def _work(self, folder: Path) -> Work:
        """Fetch all that the child reads. Raises FileNotFoundError, LoramuxError."""
        job, parts = self._job, self._parts
        async with self._database.read() as session:
            checkpoints = await TrainingJobs(session).checkpoints(job.id)
        adapter = None
        if job.adapter_digest is not None:
            adapter = await asyncio.to_thread(parts.blobs.directory, job.adapter_digest)
        for field, id in (("training_file", job.training_file_id), ("validation_file", job.validation_file_id)):
            if id is not None:
                digest = await asyncio.to_thread(self._write_examples, id, folder / f"{field}.jsonl", folder / field)
                self._digests[field] = digest
        if checkpoints:
            await asyncio.to_thread(self._fetch_checkpoint, checkpoints[0], folder)
        base, settings = self._base, parts.settings
        return Work(
            model_dir=str(base),
            examples=str(folder / "training_file"),
            validation=None if job.validation_file_id is None else str(folder / "validation_file"),
            folder=str(folder),
            adapter=None if adapter is None else str(adapter),
            checkpoint=str(_checkpoint_folder(folder, checkpoints[0].step)) if checkpoints else None,
            trained_tokens=job.trained_tokens,
            options=job.options,
            template_digest=job.template_digest,
            context=job.context,
            max_tokens=settings.max_tokens,
            learning_rate=settings.learning_rate,
            checkpoint_seconds=settings.checkpoint_seconds,
            device=settings.device,
            threads=settings.threads,
            gives_way=settings.share < 1,
            limits=JobLimits(
                memory_bytes=settings.memory_bytes,
                cpu_seconds=settings.job_seconds * settings.threads,
                wall_seconds=2 * settings.job_seconds,
                file_bytes=MAX_FILE_BYTES,
                readable=tuple(str(path) for path in (base, adapter) if path is not None),
                writable=(str(folder),),
            ),
        )

    def _write_examples(self, file_id: str, raw: Path, target: Path) -> str:
        """Write the examples of a file as the child reads them; return the file's SHA-256."""
        self._parts.blobs.objects.fetch(object_name(file_id), raw)
        with raw.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        file = ExampleFile(open_input(raw, self._parts.settings.max_examples), self._parts.format)
        with target.open("wb") as lines:
            for number in range(len(file)):
                one = {"place": file.source.place(number), "example": file.read(number)}
                lines.write(msgspec.json.encode(one) + b"\n")
        raw.unlink()
        return digest

    def _fetch_checkpoint(self, checkpoint: TrainingCheckpoint, folder: Path) -> None:
        into = _checkpoint_folder(folder, checkpoint.step)
        into.mkdir()
        for name in checkpoint.files:
            self._parts.blobs.objects.fetch(checkpoint_object(self._job.id, checkpoint.step, name), into / name)

    async def _start(self, folder: Path) -> Process:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        threads = str(self._parts.settings.threads)
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OPENBLAS_NUM_THREADS": "1",  # its threads start at the import, before the jail
        }
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _CHILD),
            stdin=PIPE,
            stdout=PIPE,
            cwd="/",
            env=environment,
            process_group=0,
            limit=MAX_REPORT_BYTES,
        )

    async def _converse(self, child: Process, work: Work, folder: Path) -> None:
        """Send the work, follow the child's reports, and pass on the orders of the job's row."""
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(work) + b"\n")
        ordered = _Orders(child)
        reading = asyncio.create_task(_next_report(child))
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=LOOK_SECONDS)
                await self._look(ordered)
                if not done:
                    continue
                report = reading.result()
                if isinstance(report, Ended | Fault):
                    await self._conclude(report)
                    return
                await self._note(report, ordered, folder)
                reading = asyncio.create_task(_next_report(child))
        except OSError as error:  # the child has closed its end
            raise ChildDied(f"the child ended: {error}") from None
        finally:
            reading.cancel()

    async def _look(self, ordered: _Orders) -> None:
        """Read the job's row, and pass on what it wants. Raises LeaseLost."""
        try:
            async with self._database.read() as session:
                job = await TrainingJobs(session).of_trainer_and_id(self._trainer_id, self._job.id)
        except RecordsUnavailable as error:
            logger.warning("the training job %s goes on without the database: %s", self._job.id, error)
            return
        if job is None:
            raise LeaseLost
        self._job = job
        if job.wanted is not None:
            self._parts.share.release(ordered.child)
            ordered.stop()
        elif job.state == RUNNING and job.plan is not None:
            ordered.go()

    async def _note(self, report: Report, ordered: _Orders, folder: Path) -> None:
        match report:
            case Prepared(plan):
                self._every = max(1, plan.total_steps // LOGGED_STEPS)
                async with self._database.begin() as session:
                    jobs = await self._held(TrainingJobs(session))
                    await jobs.change(self._job.id, plan=msgspec.structs.replace(plan, digests=self._digests))
                    if self._job.state == VALIDATING_FILES:
                        await jobs.change(self._job.id, state=QUEUED)
                        message = "Files validated, moving job to queued state"
                        await jobs.log(self._job.id, message, self._database.now())
                ordered.is_prepared = True
            case Progress():
                with suppress(RecordsUnavailable):  # figures of a step are no reason to begin again
                    await self._note_progress(report)
            case Saved():
                await self._store(report, folder)
                ordered.stored()
            case Sampled():
                await self._note_samples(report)

    async def _note_progress(self, report: Progress) -> None:
        """Write the figures of LOGGED_STEPS steps at most into the job's log, and estimate the end at times."""
        now = time.monotonic()
        self._began = self._began or (now, report.step)
        plan = self._job.plan
        if plan is None or (report.step % self._every and "valid_loss" not in report.figures):
            return
        figures = {"step": report.step, "total_steps": plan.total_steps, "epoch": report.epoch, **report.figures}
        figures["trained_tokens"] = report.trained_tokens
        loss = report.figures.get("train_loss")
        message = f"Step {report.step}/{plan.total_steps}" + ("" if loss is None else f": training loss={loss:.4f}")
        async with self._database.begin() as session:
            jobs, at = await self._held(TrainingJobs(session)), self._database.now()
            await jobs.log(self._job.id, message, at, data=msgspec.json.encode(figures).decode())
            if now - self._logged_at > LOG_SECONDS and (done := report.step - self._began[1]):
                self._logged_at = now
                left = (now - self._began[0]) / done * (plan.total_steps - report.step)
                await jobs.change(self._job.id, estimated_finish=at + int(left * SECOND))

    async def _note_samples(self, report: Sampled) -> None:
        """Write samples into the job's log, unless its tenant has zero retention."""
        message = f"Answers at step {report.step}" if report.step else "Answers before the training"
        data = msgspec.json.encode({SAMPLES: report.samples, "step": report.step}).decode()
        async with self._database.begin() as session:
            jobs = await self._held(TrainingJobs(session))
            if not await TenantRepository(session).has_zero_retention(self._job.tenant_id):
                await jobs.log(self._job.id, message, self._database.now(), data=data)

    async def _store(self, saved: Saved, folder: Path) -> None:
        """Store a checkpoint: its objects, then its row, the tokens and the log in one transaction."""
        source = _checkpoint_folder(folder, saved.step)
        names = tuple(name for name in (*ADAPTER_FILES, *STATE_FILES) if (source / name).is_file())
        for name in names:
            target = checkpoint_object(self._job.id, saved.step, name)
            await asyncio.to_thread(self._parts.blobs.objects.put_file, target, source / name)
        now = self._database.now()
        checkpoint = TrainingCheckpoint(
            job_id=self._job.id,
            step=saved.step,
            files=names,
            is_epoch=saved.is_epoch,
            trained_tokens=saved.trained_tokens,
            metrics=msgspec.json.encode({"step": saved.step, **saved.figures}).decode(),
            created_at=now,
        )
        async with self._database.begin() as session:
            jobs = await self._held(TrainingJobs(session))
            await jobs.add_checkpoint(checkpoint)
            await jobs.change(self._job.id, trained_tokens=saved.trained_tokens, trainer_attempts=0)
            await jobs.log(self._job.id, f"Checkpoint created at step {saved.step}", now)
            surplus = await jobs.drop_surplus_checkpoints(self._job.id, self._parts.settings.max_checkpoints)
        for one in surplus:
            gone = [checkpoint_object(one.job_id, one.step, name) for name in one.files]
            await asyncio.to_thread(self._parts.blobs.objects.delete, gone)

    async def _conclude(self, report: Ended | Fault) -> None:
        if isinstance(report, Fault):
            await self.end(FAILED, Refusal(report.code, report.message, report.param))
        elif report.is_complete:
            await self.end(SUCCEEDED)
        elif self._job.wanted == "pause":
            async with self._database.begin() as session:
                jobs = await self._held(TrainingJobs(session))
                await jobs.change(self._job.id, state=PAUSED, wanted=None, trainer_id=None)
                await jobs.log(self._job.id, "The job is paused", self._database.now())
        else:
            await self.end(CANCELLED)

    async def _held(self, jobs: TrainingJobs) -> TrainingJobs:
        """Return the repository after it has locked the job, which this trainer must hold. Raises LeaseLost."""
        job = await jobs.held(self._job.id, trainer_id=self._trainer_id)
        if job is None:
            raise LeaseLost
        self._job = job
        return jobs


class _Orders:
    """The orders to one child; each is sent once, when the child can follow it."""

    def __init__(self, child: Process) -> None:
        assert child.stdin is not None
        self.child = child
        self._stdin = child.stdin
        self._is_told = self._is_stopped = False
        self.is_prepared = False
        """True: the child waits for the order to begin, or trains."""

    def go(self) -> None:
        """Let the child begin to train."""
        if self.is_prepared and not self._is_told and not self._is_stopped:
            self._is_told = True
            self._stdin.write(GO)

    def stop(self) -> None:
        """Let the child write a checkpoint and end."""
        if self.is_prepared and not self._is_stopped:
            self._is_stopped = True
            self._stdin.write(STOP)

    def stored(self) -> None:
        """Let the child go on after a checkpoint."""
        self._stdin.write(STORED)


async def _next_report(child: Process) -> Report:
    """Read a report. Raises ChildDied."""
    assert child.stdout is not None
    try:
        line = await child.stdout.readuntil(b"\n")
        return decode_report(line)
    except asyncio.IncompleteReadError:
        raise ChildDied(f"the child ended with status {await child.wait()} without a report") from None
    except (asyncio.LimitOverrunError, msgspec.MsgspecError) as error:
        raise ChildDied(f"the child sent what is no report: {error}") from None


def training_folder(job_id: str) -> str:
    """Return the folder of a job's objects in the store."""
    return f"training/{job_id}"


def checkpoint_object(job_id: str, step: int, name: str) -> str:
    """Return the name of a checkpoint's file in the store."""
    return f"{training_folder(job_id)}/{step:09d}/{name}"


def _checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}"
