"""The engine's own scheduler, run against a model of a device: policies, bounds and capacity without a GPU.

    planner       the fewest GPUs that meet a workload's goals
    simulation    the loop: engines, the fleet's router, requests that come
    engine        one engine: the real scheduler over a modelled disk, link and device
    report        times, the service gap, the figures
    traffic       the requests: drawn from clients, or read from a log
    scenario      what is simulated
    hardware      devices and models as numbers, and the time of a step

A step takes no time here: its duration is computed from its work, and the clock is advanced by it. Everything else
(admission, eviction, preemption, routing) is the code that serves.
"""

from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS
from loramux.simulator.planner import ADAPTER_RANK, Goals, Plan, Planner, Trial
from loramux.simulator.report import Report, ServiceGap, plot_report
from loramux.simulator.scenario import Scenario, ScenarioError, load_scenario, make_scenario, model_of, scenario_names
from loramux.simulator.simulation import Simulation, Stalled
from loramux.simulator.traffic import read_workload

__all__ = [
    "ADAPTER_RANK",
    "DEVICES",
    "MODELS",
    "WEIGHT_BITS",
    "Goals",
    "Plan",
    "Planner",
    "Report",
    "Scenario",
    "ScenarioError",
    "ServiceGap",
    "Simulation",
    "Stalled",
    "Trial",
    "load_scenario",
    "make_scenario",
    "model_of",
    "plot_report",
    "read_workload",
    "scenario_names",
]
