"""Parts of the GPU's runner, tested without a GPU: buffers, buckets, recordings, the sampler's parameters."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapter_zoo import Zoo
from delayed_runner import late_engine
from msgspec.structs import replace
from sampler_alone import SamplerAlone
from scheduler_harness import decoding

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux.engine.execution.assembly import allocate_pool, extrapolate
from loramux.engine.execution.attention import KvLayout, LayerShape
from loramux.engine.execution.cuda_graphs import (
    CaptureFailed,
    Recording,
    ReservedAttention,
    choose_recorder,
    decode_buckets,
    host_syncs_of,
    or_calls,
    record_calls,
    step_buckets,
)
from loramux.engine.execution.device_sampler import MAX_TERMS, DeviceSampler, PendingTokens, SampledRows
from loramux.engine.execution.runner import StepGraphs, StepInputs, pack
from loramux.engine.execution.sampler import Sampler
from loramux.engine.execution.step_buffers import NUM_PATCHES, StepBuffers
from loramux.engine.execution.vision import ImageEffects
from loramux.engine.messages import ImageInput, Request, SamplingParams
from loramux.engine.scheduling.sequence import PENDING, Chunk, Sequence, Step
from loramux_adapters.bank import AdapterBank, Site, pages_per_slot
from loramux_kernels.cuda.work_lists import DECODE_SHAPES, LONG, AttentionShape, plan_states
from loramux_kernels.tables import NO_TOKEN

CPU = torch.device("cpu")
EOS = 9


def sequence(name: str = "r", prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0} | params)
    made = Sequence(Request(id=name, tenant="t", prompt_token_ids=list(prompt), sampling=sampling), 0.0)
    made.token_ids += output
    made.pages = list(range(5, 5 + len(made.token_ids)))
    return made


def decode(*sequences: Sequence, slots: tuple[int, ...] = ()) -> Step:
    slots = slots or (-1,) * len(sequences)
    return Step.ordered(Chunk(s, len(s.token_ids) - 1, 1, slot) for s, slot in zip(sequences, slots, strict=True))


def test_graph_buckets_hold_every_count_and_waste_little() -> None:
    for most in (1, 3, 8, 63, 64, 200, 256):
        chosen = decode_buckets(most)
        assert chosen[-1] == most
        assert list(chosen) == sorted(set(chosen))
        for count in range(1, most + 1):
            bucket = next(bucket for bucket in chosen if bucket >= count)
            assert bucket - count <= max(1, bucket // 2 if bucket < 16 else 15)
    assert decode_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for most in (1, 3, 100, 1000, 2048):
        chosen = step_buckets(most)
        assert chosen[-1] == most
        assert list(chosen) == sorted(set(chosen))
        for count in range(257, most + 1):
            assert next(bucket for bucket in chosen if bucket >= count) - count <= count / 4


def filled(buffers: StepBuffers, step: Step) -> StepInputs:
    inputs = buffers.fill(pack(step, 2, buffers.state_pages, buffers.block_tables))
    send(buffers)
    return inputs


def send(buffers: StepBuffers) -> None:
    buffers.memory.send()
    buffers.block_tables.apply()


def test_step_buffers_keep_their_addresses_and_padding_rows_store_nothing() -> None:
    buffers = StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU)
    fixed = buffers.padded(4)
    first = decode(sequence(prompt=(3, 4, 5)), sequence("q", (6,)), sequence("z", (7, 8)))
    inputs = filled(buffers, first)
    assert inputs.input_ids.tolist() == [5, 6, 8]
    assert fixed.input_ids.tolist() == [5, 6, 8, 0]
    assert fixed.position_ids.tolist() == [2, 0, 1, 0]
    assert fixed.batch.slot_mapping.tolist() == [6 * 2, 5 * 2, 5 * 2 + 1, -1]
    assert inputs.batch.block_table[inputs.batch.table_rows[0]].tolist()[:3] == [5, 6, 7]
    assert inputs.batch.spans == ((0, 1, 3), (1, 2, 1), (2, 3, 2))
    addresses = [t.data_ptr() for t in (fixed.input_ids, fixed.batch.slot_mapping, fixed.batch.block_table)]
    inputs = filled(buffers, decode(sequence("q", (6, 2))))
    assert fixed.input_ids.tolist() == [2, 0, 0, 0]
    assert fixed.batch.slot_mapping.tolist() == [11, -1, -1, -1]
    assert [t.data_ptr() for t in (fixed.input_ids, fixed.batch.slot_mapping, fixed.batch.block_table)] == addresses
    assert inputs.input_ids.data_ptr() == fixed.input_ids.data_ptr()


def test_step_buffers_hold_places_of_tokens_and_ends_of_rows_next_to_steps_without_images() -> None:
    """An image of two lines of two tokens after the first token, and text after it."""
    effects = ImageEffects(has_places=True, layers_ahead="in every layer")
    buffers = StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU, effects=effects)
    fixed = buffers.padded(6, with_ends=True)
    image = ImageInput(digest="d", patches=b"", grid=(1, 4, 4), start=1, num_tokens=4)
    seen, text = sequence(prompt=(1, 2, 2, 2, 2, 3)), sequence("q", (6, 7))
    seen.request = replace(seen.request, images=(image,))
    step = Step.ordered((Chunk(seen, 0, 6, -1),))
    inputs = buffers.fill(pack(step, 2, 0, buffers.block_tables, effects))
    send(buffers)
    assert inputs.position_ids.tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    assert fixed.position_ids.tolist() == inputs.position_ids.tolist()
    assert fixed.batch.row_ends is not None
    assert fixed.batch.row_ends.tolist() == [1, 5, 5, 5, 5, 6]
    inputs = filled(buffers, decode(text))
    assert inputs.batch.row_ends is None
    assert fixed.position_ids.tolist() == 3 * [[1, 0, 0, 0, 0, 0]]


def test_step_buffers_keep_the_pages_of_states_next_to_those_of_kv() -> None:
    buffers = StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU, state_pages=2)
    fixed = buffers.padded(4).batch
    first, second = sequence(prompt=(3, 4, 5)), sequence("q", (6,))
    first.pages, second.pages = [5, 6, 7, 8], [2, 1, 9]
    batch = filled(buffers, decode(first, second)).batch
    assert batch.table_rows is not None
    assert fixed.state_tables[batch.table_rows].tolist() == [[5, 6], [2, 1]]
    assert fixed.block_table[batch.table_rows, :2].tolist() == [[7, 8], [9, 0]]
    assert fixed.slot_mapping.tolist()[:2] == [8 * 2, 9 * 2]
    assert plan_states(batch).singles.work[1:3, 0].tolist() == batch.table_rows.tolist()
    assert fixed.state_tables.data_ptr() == batch.state_tables.data_ptr()


def test_step_buffers_take_a_pending_token_from_the_step_before() -> None:
    """In any row: a preempted sequence prefills through it."""
    buffers = StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU)
    waiting, preempted = sequence("w", (1, 2), (PENDING,)), sequence("p", (3, 4), (PENDING,))
    step = Step((Chunk(waiting, 2, 1), Chunk(preempted, 0, 3)))
    sampler = DeviceSampler((), buffers.memory, 4, 4, 99, CPU)
    sampler._tokens[:2] = torch.tensor([77, 66])
    sampler.stage(SampledRows([waiting, preempted]), PendingTokens([waiting, preempted], *np.array([[0, 3], [1, 0]])))
    inputs = filled(buffers, step)
    sampler.insert_pending(inputs.input_ids)
    assert inputs.input_ids.tolist() == [66, 3, 4, 77]


def table_of(buffers: StepBuffers, step: Step) -> list[list[int]]:
    """Return each sequence's pages as the device has them after the step's copy."""
    batch = filled(buffers, step).batch
    assert batch.table_rows is not None
    rows = batch.block_table[batch.table_rows].tolist()
    return [row[: len(chunk.sequence.pages)] for row, chunk in zip(rows, step.chunks, strict=True)]


def test_block_tables_send_the_pages_that_changed_alone() -> None:
    buffers = StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU)
    grows, shrinks = sequence("g", (1, 2)), sequence("s", (1, 2, 3))
    step = decode(grows, shrinks)
    assert table_of(buffers, step) == [[5, 6], [5, 6, 7]]
    buffers.block_tables.on_device.fill_(-7)
    grows.pages = [5, 6, 9]
    assert table_of(buffers, step)[0] == [-7, -7, 9], "the others are there already"
    shrinks.drop_kv()  # preempted
    shrinks.pages = [4]
    assert table_of(buffers, step)[1] == [4]


def test_step_for_other_ranks_has_the_pages_that_changed_instead_of_tables() -> None:
    """Tables are as large as all contexts; each rank keeps its own, and has the same pages in the same rows."""
    first, other = (StepBuffers(max_rows=8, max_sequences=4, max_blocks=6, max_rank=16, device=CPU) for _ in range(2))
    step = decode(sequence("a", (1, 2)), sequence("b", (1, 2, 3)))
    packed = pack(step, 2, 0, first.block_tables).for_other_ranks()
    assert packed.block_table.size == packed.state_tables.size == 0
    batch = other.fill(packed).batch
    send(other)
    assert batch.table_rows is not None
    rows = batch.block_table[batch.table_rows].tolist()
    assert [row[: len(chunk.sequence.pages)] for row, chunk in zip(rows, step.chunks, strict=True)] == [
        [5, 6],
        [5, 6, 7],
    ]


def test_block_tables_give_rows_of_absent_sequences_to_others() -> None:
    buffers = StepBuffers(max_rows=8, max_sequences=2, max_blocks=6, max_rank=16, device=CPU)
    first, second, third = (sequence(name, (1, 2)) for name in "abc")
    second.pages, third.pages = [7, 8], [3]
    assert table_of(buffers, decode(first, second)) == [[5, 6], [7, 8]]
    assert table_of(buffers, decode(third, second)) == [[3], [7, 8]], "without word that the first has ended"
    buffers.block_tables.forget("c")
    assert table_of(buffers, decode(first, second)) == [[5, 6], [7, 8]]


def test_block_tables_take_more_new_pages_than_the_copy_has_room_for() -> None:
    buffers = StepBuffers(max_rows=8, max_sequences=2, max_blocks=NUM_PATCHES + 9, max_rank=16, device=CPU)
    long, short = sequence("l"), sequence("s")
    long.pages = list(range(NUM_PATCHES + 5, 0, -1))
    assert table_of(buffers, decode(long, short)) == [long.pages, [5, 6]]


def test_step_buffers_have_room_for_every_work_list_of_the_largest_rank() -> None:
    buffers = StepBuffers(max_rows=4096, max_sequences=300, max_blocks=2, max_rank=16_384, device=CPU, state_pages=1)
    DeviceSampler((), buffers.memory, 300, 300, 97, CPU)
    ReservedAttention([AttentionShape(2, 1, window, 64) for window in (None, 8, 16, 32)], buffers)
    buffers.padded_segments(4, (*DECODE_SHAPES, LONG))


def test_recording_follows_its_buffers() -> None:
    buffer = torch.zeros(3)
    output = torch.zeros(3)
    recording = record_calls(lambda: output.copy_(buffer * 2), buffer)
    buffer.fill_(4)
    assert output.tolist() == [0, 0, 0]
    recording.replay()
    assert output.tolist() == [8, 8, 8]


def test_function_that_waits_for_the_device_is_not_put_into_a_graph(caplog) -> None:
    buffer = torch.ones(3)
    assert host_syncs_of(lambda: buffer * 2) == set()
    assert host_syncs_of(lambda: buffer * buffer.max().item()) == {"_local_scalar_dense", "item"}
    assert host_syncs_of(lambda: buffer if buffer.sum() > 0 else -buffer) == {"_local_scalar_dense"}
    assert host_syncs_of(lambda: buffer[buffer > 0]) == {"index"}
    assert host_syncs_of(lambda: buffer[torch.tensor([2, 0])]) == set()
    assert host_syncs_of(lambda: buffer * len(buffer.tolist())) == {"tolist"}
    assert host_syncs_of(buffer.cpu) == {"cpu"}
    assert host_syncs_of(lambda: buffer.to("cpu")) == {"to"}
    assert host_syncs_of(lambda: buffer.to(device="cpu", dtype=torch.float64)) == {"to"}
    assert host_syncs_of(lambda: torch.from_numpy(buffer.numpy())) == {"numpy"}
    assert host_syncs_of(lambda: buffer.to(torch.float64).to(buffer.device)) == set()
    assert choose_recorder(lambda: buffer * buffer.max().item(), CPU) is record_calls
    assert "without CUDA graphs" in caplog.text


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((7, 500), (13, 560), 500 + 60 + 10 * 87), ((7, 500), (13, 480), 500), ((7, 500), (7, 500), 500)],
    ids=["graphs grow", "the second reused memory", "one bucket alone"],
)
def test_memory_of_all_recordings_is_extrapolated_from_two_buckets(first, second, expected) -> None:
    assert extrapolate(first, second, 100 if second[0] == 13 else 7) == expected


def test_recording_that_fails_is_replaced_by_a_call_and_the_others_are_graphs(caplog) -> None:
    """A reason is logged once."""
    buffer, asked = torch.zeros(3), []

    def record(function, inputs):
        asked.append(function)
        if len(asked) in (1, 3):
            raise torch.OutOfMemoryError(f"no memory for graph {len(asked)}")
        if len(asked) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recording(function, inputs, is_graph=True)

    record_either = or_calls(record)
    outputs = torch.zeros(6, 3)
    recordings = [record_either(lambda n=n: outputs[n].copy_(buffer + n), buffer) for n in range(6)]
    buffer.fill_(4)
    for recording in recordings:
        recording.replay()
    assert outputs[:, 0].tolist() == [4, 5, 6, 7, 8, 9]
    assert [one.is_graph for one in recordings] == [False, True, False, False, True, True]
    assert caplog.text.count("recording failed") == 2
    assert caplog.text.count("OutOfMemoryError: no memory for graph 1") == 1


def test_recording_over_ranks_falls_back_only_if_the_capture_fails() -> None:
    """A rank that stops in the middle of a forward must end: the others wait in its sums."""
    errors = [CaptureFailed("not permitted"), torch.OutOfMemoryError("no memory")]

    def record(function, inputs):
        raise errors.pop(0)

    record_either = or_calls(record, over_ranks=True)
    assert not record_either(lambda: None, None).is_graph
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        record_either(lambda: None, None)


def test_engines_of_one_process_record_one_after_the_other() -> None:
    inside, most = [], []

    def record(function, inputs):
        inside.append(function)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        return record_calls(function, inputs)

    def record_all() -> None:
        record_either = or_calls(record)
        for _ in range(4):
            record_either(lambda: None, None)

    engines = [threading.Thread(target=record_all) for _ in range(3)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert most == [1] * 12


def test_failed_recordings_are_counted_in_the_statistics(tmp_path) -> None:
    """Count the recordings of both kinds of a runner."""
    zoo = Zoo("llama", tmp_path)
    engine, runner = late_engine(zoo)
    runner.graphs = StepGraphs(recorded=190, missing=2)
    stats = engine.stats()
    assert (stats.step_graphs, stats.step_graphs_missing) == (190, 2)


def bank_of(num_sites: int, max_rank: int, num_pages: int, max_slots: int) -> AdapterBank:
    sites = {str(i): Site(i, 1, 1) for i in range(num_sites)}
    return AdapterBank(torch.empty(64 * num_pages), 64, sites, max_rank, max_slots)


def test_gpu_pool_leaves_room_for_everything_else(monkeypatch) -> None:
    """The card has 1000 MB, 700 of them free, and the share is 0.9: 600 MB minus activations, in pages that each bring
    their share of the tables."""
    bank = bank_of(num_sites=7, max_rank=32, num_pages=1, max_slots=5)
    row_bytes = bank.slot_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700_000_000, 1_000_000_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    weights = torch.nn.Linear(1, 50_000_000, bias=False, device="meta", dtype=torch.float32)
    allocated: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda elements, **_: allocated.append(elements))
    settings = Settings(model=ModelSettings(path="", served_model_name="m"))
    page_bytes = KvLayout((LayerShape(2, 16, 16),) * 3, block_size=16, itemsize=4).page_bytes
    model = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, parameters=weights.parameters)
    allocate_pool(settings, model, SimpleNamespace(packed_bytes=100_000_000), page_bytes, 50_000_000, row_bytes)
    pages, rest = divmod(allocated[0] * 4, page_bytes)
    assert rest == 0
    assert pages * (page_bytes + row_bytes) <= 550_000_000 < (pages + 1) * (page_bytes + row_bytes)
    table = bank.table
    tensors = (table.a_offsets, table.b_offsets, table.ranks, table.scales, bank.vectors.columns, bank.vectors.inputs)
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 5 * row_bytes


@pytest.mark.parametrize(("page_bytes", "slot_bytes", "pages"), [(2 << 20, 19_712, 1), (1_572_864, 1_084_512, 35)])
def test_tables_of_slots_stay_small_compared_with_the_pool(page_bytes: int, slot_bytes: int, pages: int) -> None:
    """A Llama of 8B with ranks up to 64, and a mixture of 128 experts in 48 layers, whose row is as large as a page."""
    assert pages_per_slot(page_bytes, slot_bytes) == pages
    assert slot_bytes / pages <= 0.02 * page_bytes


@pytest.mark.parametrize(("num_pages", "max_slots"), [(100, 100), (100, 33), (100, 1), (3, 7)])
def test_slots_never_run_out_before_pages_do(num_pages: int, max_slots: int) -> None:
    bank = bank_of(1, 16, num_pages, max_slots)
    assert num_pages // bank.least_pages <= max_slots


def events(logits: torch.Tensor, *sequences: Sequence):
    return SamplerAlone((EOS,), logits.shape[1]).launch(logits, SampledRows(list(sequences))).events()


def test_device_sampler_greedy_rows_agree_with_the_hosts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 30)
    sequences = [
        sequence("a", (1, 2), (3, 3)),
        sequence("b", (1, 2), (3, 4), repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
        sequence("c", logit_bias={7: 50.0}),
        sequence("d", min_tokens=2, stop_token_ids=(4,), logit_bias={EOS: 100.0, 4: 100.0, 6: 90.0}),
        sequence("e", logprobs=3),
        sequence("f", allowed_token_ids=(2, 29), logprobs=1, logprob_token_ids=(5, 6)),
        sequence("g", allowed_token_ids=(EOS,), min_tokens=2, logprobs=0, logprob_token_ids=(EOS,)),
    ]
    host = Sampler((EOS,)).sample(logits, decoding(sequences))
    device = events(logits, *sequences)
    assert [e.token_id for e in device] == [e.token_id for e in host]
    assert device[3].token_id == 6
    for of_host, of_device in zip(host[4:], device[4:], strict=True):
        assert of_device.logprob == pytest.approx(of_host.logprob)
        assert [t.token_id for t in of_device.top_logprobs] == [t.token_id for t in of_host.top_logprobs]
        alternatives = [t.logprob for t in of_host.top_logprobs]
        assert [t.logprob for t in of_device.top_logprobs] == pytest.approx(alternatives)


def test_device_sampler_ends_answers_as_the_host_does() -> None:
    logits = torch.zeros(3, 12)
    logits[:, EOS] = 5.0
    told = events(
        logits, sequence("a"), sequence("b", ignore_eos=True), sequence("c", ignore_eos=True, stop_token_ids=(EOS,))
    )
    assert [event.finish_reason for event in told] == ["stop", None, "stop"]


def test_device_sampler_penalty_counts_a_pending_token() -> None:
    sampler = SamplerAlone((EOS,), 12)
    penalised = sequence("p", (1,), frequency_penalty=2.0)
    first = torch.zeros(1, 12)
    first[0, 5] = 1.0
    before = sampler.launch(first, SampledRows([penalised])).sampled
    penalised.token_ids.append(PENDING)
    second = torch.zeros(1, 12)
    second[0, [5, 6]] = torch.tensor([3.0, 1.5])
    assert sampler.launch(second, SampledRows([penalised]), before).events()[0].token_id == 6


def test_device_sampler_bias_follows_its_rows() -> None:
    """The end of `min_tokens`, other rows, and another request with the same id are noticed."""
    sampler, logits = SamplerAlone((EOS,), 12), torch.zeros(2, 12)
    biased = sequence("b", logit_bias={7: 5.0, 3: 4.0, 99: 9.0}, min_tokens=2)
    plain = sequence("p")

    def tokens(*rows: Sequence) -> list[int]:
        return [event.token_id for event in sampler.launch(logits[: len(rows)], SampledRows(list(rows))).events()]

    logits[:, EOS] = 6.0
    assert tokens(biased, plain) == [7, EOS]
    biased.token_ids.append(7)
    assert tokens(biased, plain) == [7, EOS]
    assert tokens(plain, biased) == [EOS, 7]
    assert tokens(biased, plain) == [7, EOS]
    biased.token_ids.append(7)
    assert tokens(biased, plain) == [EOS, EOS], "the answer may end now"
    sampler.sampler.forget("b")
    assert not sampler.sampler._biases._terms
    assert tokens(sequence("b", logit_bias={3: 9.0}), plain) == [3, EOS]


def test_device_sampler_bias_of_more_terms_than_the_copy_has_room_for_is_applied_outside_recordings() -> None:
    sampler, logits = SamplerAlone((EOS,), 3000), torch.zeros(2, 3000)
    wide = sequence("w", logit_bias=dict.fromkeys(range(100, 100 + MAX_TERMS), 1.0) | {5: 2.0})
    assert not sampler.stage(SampledRows([wide])).is_recordable
    for _ in range(2):
        told = sampler.replay(logits, SampledRows([sequence("p", logit_bias={8: 1.0}), wide])).events()
        assert [event.token_id for event in told] == [8, 5]


def test_device_sampler_repeats_with_a_seed_and_not_without() -> None:
    logits = torch.zeros(1, 500)

    def draws(**params) -> list[int]:
        sampler, tokens = SamplerAlone((EOS,), 500), []
        s = sequence("s", temperature=1.0, **params)
        for _ in range(5):
            tokens.append(sampler.launch(logits, SampledRows([s])).events()[0].token_id)
            s.token_ids.append(tokens[-1])
        sampler.sampler.forget("s")
        assert not sampler.sampler._seeds
        return tokens

    assert draws(seed=3) == draws(seed=3)
    assert draws(seed=-1) != draws(seed=3)
    assert draws() != draws()


def test_device_sampler_stages_no_rows_first_and_after_others_have_ended() -> None:
    """A step of chunks of prompts alone."""
    sampler = SamplerAlone((EOS,), 12)
    assert len(sampler.stage(SampledRows([])).batch.seed) == 0
    sampler.stage(SampledRows([sequence("a"), sequence("b")]))
    sampler.sampler.forget("a")
    assert len(sampler.stage(SampledRows([])).batch.seed) == 0


def test_device_sampler_of_no_rows_returns_no_events() -> None:
    """A chunk of a prompt."""
    assert events(torch.zeros(0, 12)) == []


@pytest.mark.parametrize("broken", ["nan", "-inf", "inf"])
def test_device_sampler_ends_a_row_that_is_not_finite_with_a_fault(broken: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 30)
    params = [{"logprobs": 2}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}]
    alone = [events(logits[row : row + 1], sequence(str(row), **params[row]))[0] for row in (0, 2)]
    logits[1] = float(broken)
    rows = SampledRows([sequence(str(row), **params[row]) for row in range(3)])
    in_flight = SamplerAlone((EOS,), 30).launch(logits, rows)
    told = in_flight.events()
    assert [told[0].token_id, told[2].token_id] == [event.token_id for event in alone]
    assert told[0].top_logprobs == alone[0].top_logprobs
    assert told[1].finish_reason == "error"
    assert told[1].token_id is None
    assert told[1].fault is not None
    assert in_flight.sampled.tokens[1] == NO_TOKEN


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6])
def test_device_sampler_takes_a_tiny_temperature(temperature: float) -> None:
    (event,) = events(torch.tensor([[1.0, 300.0, 2.0, 299.0]]), sequence(temperature=temperature, seed=3))
    assert event.token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_device_sampler_steering_that_overflows_still_yields_tokens(temperature: float) -> None:
    params = {"temperature": temperature, "repetition_penalty": 1e-38, "presence_penalty": 1e300, "seed": 1}
    sequences = [sequence("extreme", (1, 0), (2,), **params), sequence("beside", (1,), ())]
    logits = torch.tensor([[1.0, 300.0, -2.0, 299.0], [0.0, 0.0, 5.0, 0.0]])
    extreme, beside = SamplerAlone((EOS,), 4).launch(logits, SampledRows(sequences)).events()
    assert (extreme.token_id, beside.token_id) == (1, 2)


def test_device_sampler_row_without_a_token_gives_the_next_step_a_valid_id_and_no_count() -> None:
    sampler, broken = SamplerAlone((EOS,), 4), sequence("b", (1,), (), frequency_penalty=1.0)
    before = sampler.launch(torch.full((1, 4), float("nan")), SampledRows([broken])).sampled
    broken.token_ids.append(PENDING)
    sampler.input_ids.fill_(3)
    sampler.stage(SampledRows([broken]), before)
    assert sampler.input_ids[0] == 0
    assert sampler.sampler._counts.table.count_nonzero() == 1, "the prompt's token"


STEERED = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_p": 0.7, "seed": 4},
    {"temperature": 1.2, "top_k": 3, "min_p": 0.05, "seed": 5},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.8, "top_p": 0.9, "seed": 6},
    {"logit_bias": {4: 5.0, 9: -5.0}},
    {"min_tokens": 5, "logit_bias": {EOS: 50.0}},
    {"temperature": 0.5, "seed": 7, "logprobs": 2},
]
"""Kinds of sampling that a recorded step has."""


@pytest.mark.parametrize("seed", range(3))
def test_recorded_choice_is_that_of_each_row_alone_while_rows_come_and_go(seed: int) -> None:
    """Rows change their places, kinds and sequences from step to step; a parameter of an earlier row would be seen."""
    rng, vocab, most = random.Random(seed), 30, 6
    together, alone = SamplerAlone((EOS,), vocab, most), {}
    alive: list[Sequence] = []
    before = {}, None
    for step in range(30):
        while len(alive) < 5 and rng.random() < 0.7:
            params = rng.choice(STEERED)
            alive.append(sequence(f"{step} {len(alive)}", (1, rng.randrange(vocab)), **params))
            alone[alive[-1].id] = SamplerAlone((EOS,), vocab, 1)
        for ended in [one for one in alive if rng.random() < 0.15]:
            alive.remove(ended)
            together.sampler.forget(ended.id)
        rng.shuffle(alive)
        rows = alive[: rng.randint(0, len(alive))]
        logits = torch.randn(most, vocab, generator=torch.Generator().manual_seed(step))
        together.sampler._tokens.fill_(-7)
        if before[1] is not None:
            together.sampler._tokens[: len(before[0])] = torch.tensor(list(before[0].values()), dtype=torch.int64)
        for one in rows:
            if one.id in before[0]:
                one.token_ids[-1] = PENDING
        told = together.replay(logits, SampledRows(rows), before[1])
        for one in rows:
            if one.id in before[0]:
                one.token_ids[-1] = before[0][one.id]
        assert (together.sampler._tokens[max(len(rows), len(before[0])) :] == -7).all(), "rows that pad"
        drawn = {}
        for row, (one, event) in enumerate(zip(rows, told.events(), strict=True)):
            (wanted,) = alone[one.id].launch(logits[row : row + 1], SampledRows([one])).events()
            assert event == wanted, one.request.sampling
            drawn[one.id] = event.token_id
            one.token_ids.append(event.token_id)
        before = drawn, told.sampled


def test_recorded_step_chooses_no_token_if_a_mask_is_still_to_come() -> None:
    sampler, logits = SamplerAlone((EOS,), 12, 4), torch.zeros(4, 12)
    free, allowed = sequence("f", temperature=1.0, seed=1), sequence("a", allowed_token_ids=(3, 4))
    sampler.sampler._tokens.fill_(-7)
    staged = sampler.stage(SampledRows([free, allowed]))
    assert not staged.is_recordable
    sampler.sampler.choose(logits)
    assert (sampler.sampler._tokens == -7).all()
    told = sampler.sampler.launch(logits[:2], staged).events()
    assert told[0] == events(logits[:1], free)[0]
    assert told[1].token_id == 3
