"""The benchmark of predictions: its workloads are the same every time, fit the server, and are simulated exactly."""

from __future__ import annotations

import msgspec
import pytest
from figures import Outcome
from loadgen import Target
from peers.serving import SystemFailed
from predictions import GOALS, LEAST_LOAD, MOST_LOAD, Figures, Predictor, errors_of, figures_of, items_for, table_of
from predictions import Row as PredictedRow
from specs import MAX_MODEL_LEN
from workloads import Item, load

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.simulator.hardware import DEVICES, MODELS, Front, MeasuredSteps
from loramux.simulator.profiles import Profile

MODEL = MODELS["qwen2.5-0.5b"]
STEPS = MeasuredSteps(
    model=MODEL,
    token_s=((1, 0.004), (16, 0.005), (1024, 0.2)),
    row_s=((1, 0.0), (16, 0.002)),
    context_s=1e-7,
    pair_s=0.0,
    adapters_s=0.0005,
    adapter_s=0.0001,
    rank_s=1e-6,
    row_rank_s=1e-7,
)
FRONT = Front(token_s=5e-5, request_s=0.002, latency_s=0.01)


@pytest.fixture
def predictor() -> Predictor:
    device = msgspec.structs.replace(DEVICES["cpu"], measured=STEPS, front=FRONT)
    profile = Profile(machine="m", commit="c", date="d", model_name="half", engine={"block_size": 16}, device=device)
    engine = EngineSettings(max_num_seqs=16, prefix_cache=False)
    return Predictor(profile, Settings(model=ModelSettings(path="x", served_model_name="half"), engine=engine))


def test_workloads_are_random_and_the_same_every_time(predictor: Predictor) -> None:
    workloads = [predictor.draw(number) for number in range(20)]
    assert workloads == [predictor.draw(number) for number in range(20)]
    assert len({workload.rate for workload in workloads}) == 20
    assert len({(workload.adapters, workload.cv) for workload in workloads}) >= 10
    for workload in workloads:
        assert LEAST_LOAD <= workload.load <= MOST_LOAD
        for item in items_for(workload, 5.0):
            assert len(item.prompt_token_ids) + item.max_tokens < MAX_MODEL_LEN


def test_prediction_is_exact_and_grows_with_the_load(predictor: Predictor) -> None:
    workload = predictor.draw(0)
    items = items_for(workload, 5.0)
    predicted = predictor.predict(items)
    assert predicted == predictor.predict(items)
    assert predicted.ttft_ms_p50 > 1e3 * FRONT.latency_s
    hurried = [msgspec.structs.replace(item, arrival_s=item.arrival_s / 100) for item in items]
    assert predictor.predict(hurried).ttft_ms_p99 > 2 * predicted.ttft_ms_p99


def test_measured_figures_count_as_the_simulator_does_and_refuse_failures(predictor: Predictor) -> None:
    items = [Item(id=f"{n}", prompt_token_ids=[5] * 10, max_tokens=4) for n in range(100)]
    outcomes = [Outcome(id=f"{n}", ttft_s=0.001 * (n + 1), total_s=1.0, output_tokens=4) for n in range(100)]
    measured = figures_of(items, outcomes, 2.0)
    assert measured == Figures(tokens_per_s=700.0, ttft_ms_p50=50.0, ttft_ms_p99=99.0)
    predicted = Figures(tokens_per_s=770.0, ttft_ms_p50=25.0, ttft_ms_p99=99.0)
    errors = errors_of(predicted, measured)
    assert errors == pytest.approx({"tokens_per_s": 0.1, "ttft_ms_p50": -0.5, "ttft_ms_p99": 0.0})
    assert errors.keys() == GOALS.keys()
    row = PredictedRow(workload=predictor.draw(1), requests=100, predicted=predicted, measured=measured, errors=errors)
    assert table_of([row]).row_count == 1
    with pytest.raises(SystemFailed, match="1 of 100 requests failed"):
        figures_of(items, [*outcomes[:-1], Outcome(id="99", total_s=1.0, error="no")], 2.0)


def test_load_generator_takes_the_workloads_of_the_planner(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("workloads")
    log, description = folder / "week.jsonl", folder / "week.toml"
    log.write_text(
        '{"arrival_s": 1.0, "prompt_tokens": 3, "output_tokens": 2, "tenant": "t", "adapter": "support"}\n'
        '{"arrival_s": 1.5, "prompt_tokens": 5, "output_tokens": 7, "tenant": "t"}\n'
    )
    description.write_text(
        'duration_s = 3\n[[clients]]\ntenant = "t"\nrate = 4\n'
        'prompt_tokens = { distribution = "constant", tokens = 30 }\n'
        'output_tokens = { distribution = "constant", tokens = 8 }\n'
    )
    first, second = load(log)
    assert (len(first.prompt_token_ids), first.max_tokens, first.arrival_s) == (3, 2, 0.0)
    assert (len(second.prompt_token_ids), second.max_tokens, second.arrival_s) == (5, 7, 0.5)
    target = Target("http://x/v1", adapter_name="t/{adapter}")
    assert [target.model(item.adapter) for item in (first, second)] == ["t/support", "base"]
    assert {len(item.prompt_token_ids) for item in load(description)} == {30}
