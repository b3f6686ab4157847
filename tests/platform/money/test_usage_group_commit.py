"""The writer: what waits together is committed together, and one bad operation harms only itself."""

import asyncio
from collections.abc import Sequence

import pytest

from loramux.common.units import QUIET_SECONDS
from loramux.data.records.errors import RecordsUnavailable
from loramux.money.usage import group_commit
from loramux.money.usage.errors import UsageClosed
from loramux.money.usage.group_commit import GroupCommit

pytestmark = pytest.mark.anyio


class Disk:
    """Remembers what each commit wrote; a commit takes until it is let go, and fails over negative numbers."""

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.outages = 0

    async def commit(self, batch: Sequence[int]) -> list[str | Exception]:
        await self.gate.wait()
        if self.outages:
            self.outages -= 1
            raise RecordsUnavailable("no answer")
        if any(number < 0 for number in batch):
            raise ValueError(f"negative: {min(batch)}")
        self.commits.append(list(batch))
        return [KeyError(0) if number == 0 else str(number) for number in batch]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "PAUSES", (0.0, 0.0))


async def started(disk: Disk, **options: int) -> GroupCommit[int, str]:
    writer: GroupCommit[int, str] = GroupCommit(disk.commit, **options)
    writer.start()
    return writer


async def outcomes(writer: GroupCommit[int, str], numbers: Sequence[int]) -> list[str | BaseException]:
    return await asyncio.gather(*(writer.submit(number) for number in numbers), return_exceptions=True)


async def test_group_commit_commits_a_lone_operation_at_once(disk: Disk) -> None:
    writer = await started(disk)
    assert await writer.submit(7) == "7"
    assert disk.commits == [[7]]
    await writer.stop()


async def test_group_commit_batches_what_arrives_during_a_commit_in_order(disk: Disk) -> None:
    writer = await started(disk)
    disk.gate.clear()
    first = writer.post(1)
    await asyncio.sleep(0)  # the writer takes it
    rest = [writer.post(number) for number in range(2, 100)]
    disk.gate.set()
    assert await first == "1"
    assert await asyncio.gather(*rest) == [str(number) for number in range(2, 100)]
    assert disk.commits == [[1], list(range(2, 100))]
    await writer.stop()


async def test_group_commit_batch_has_a_limit(disk: Disk) -> None:
    writer = await started(disk, max_batch=10)
    await outcomes(writer, range(1, 26))
    assert [len(batch) for batch in disk.commits] == [10, 10, 5]
    await writer.stop()


async def test_group_commit_isolates_a_bad_operation(disk: Disk) -> None:
    writer = await started(disk)
    answers = await outcomes(writer, [1, -2, 3, 0, 4])
    assert [str(answer) for answer in answers] == ["1", "negative: -2", "3", "0", "4"]
    assert isinstance(answers[1], ValueError)
    assert isinstance(answers[3], KeyError)
    assert disk.commits == [[1], [3, 0, 4]]
    assert await writer.submit(5) == "5"
    await writer.stop()


async def test_group_commit_retries_during_a_short_outage(disk: Disk) -> None:
    writer = await started(disk)
    disk.outages = 2
    assert await outcomes(writer, [1, 2]) == ["1", "2"]
    assert disk.commits == [[1, 2]]
    await writer.stop()


async def test_group_commit_fails_every_operation_after_a_long_outage(disk: Disk) -> None:
    writer = await started(disk)
    disk.outages = 3
    assert [type(answer) for answer in await outcomes(writer, [1, 2])] == [RecordsUnavailable] * 2
    assert await writer.submit(3) == "3"
    await writer.stop()


async def test_group_commit_commits_for_a_cancelled_caller(disk: Disk) -> None:
    writer = await started(disk)
    disk.gate.clear()
    leaving, staying = writer.post(1), writer.post(2)
    leaving.cancel()
    disk.gate.set()
    assert await staying == "2"
    assert disk.commits == [[1, 2]]
    await writer.stop()


async def test_group_commit_stop_commits_what_was_submitted(disk: Disk) -> None:
    writer = await started(disk, max_batch=3)
    posted = [writer.post(number) for number in range(1, 8)]
    await writer.stop()
    assert [future.result() for future in posted] == [str(number) for number in range(1, 8)]


async def test_group_commit_refuses_before_start_and_after_stop(disk: Disk) -> None:
    writer: GroupCommit[int, str] = GroupCommit(disk.commit)
    with pytest.raises(UsageClosed):
        await writer.submit(1)
    writer.start()
    await writer.stop()
    await writer.stop()
    with pytest.raises(UsageClosed):
        await writer.submit(1)
    writer.start()
    assert await writer.submit(2) == "2"
    await writer.stop()


async def test_patient_operations_after_others_are_committed_together(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "PATIENCE", 0.05)
    writer = await started(disk)
    await writer.submit(1)
    patient = [asyncio.create_task(writer.submit(number, patient=True)) for number in (2, 3)]
    await asyncio.sleep(0.01)
    assert disk.commits == [[1]], "the next caller would wait for theirs"
    assert await asyncio.gather(*patient) == ["2", "3"]
    assert disk.commits == [[1], [2, 3]], "they wait for others, and not for ever"
    await writer.stop()


async def test_patient_operations_that_keep_coming_are_committed_a_few_times(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "PATIENCE", 0.1)
    writer = await started(disk)
    await writer.submit(99)
    patient, clock = [], asyncio.get_running_loop().time
    began = clock()
    for number in range(1, 31):
        patient.append(asyncio.create_task(writer.submit(number, patient=True)))
        await asyncio.sleep(0.01)
    await asyncio.gather(*patient)
    assert len(disk.commits) <= 2 + (clock() - began) / 0.1, "each of them waits for the first of its commit alone"
    assert sorted(number for commit in disk.commits for number in commit) == [*range(1, 31), 99]
    await writer.stop()


async def test_patient_operations_come_after_those_that_wait_by_then(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "PATIENCE", 0.01)
    writer = await started(disk)
    await writer.submit(1)
    disk.gate.clear()
    running = asyncio.create_task(writer.submit(2))
    await asyncio.sleep(0)
    patient = asyncio.create_task(writer.submit(3, patient=True))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(writer.submit(4))
    await asyncio.sleep(0)
    disk.gate.set()
    assert await asyncio.gather(running, patient, waiting) == ["2", "3", "4"]
    assert disk.commits in ([[1], [2], [4], [3]], [[1], [2], [3], [4]]), "never in one commit"
    await writer.stop()


async def test_patient_operations_alone_are_committed_at_once(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "PATIENCE", 60.0)
    writer = await started(disk)
    assert await asyncio.wait_for(writer.submit(1, patient=True), 10) == "1"
    await writer.submit(2)
    writer._last_at -= QUIET_SECONDS
    assert await asyncio.wait_for(writer.submit(3, patient=True), 10) == "3"
    await writer.stop()


async def test_stop_commits_patient_operations(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "PATIENCE", 60.0)
    writer = await started(disk)
    await writer.submit(1)
    patient = asyncio.create_task(writer.submit(2, patient=True))
    await asyncio.sleep(0)
    await asyncio.wait_for(writer.stop(), 10)
    assert await patient == "2"
