"""The engine's own scheduler, run against a model of a device: policies, bounds and capacity without a GPU."""

from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS
from loramux.simulator.planner import ADAPTER_RANK, Goals, Plan, Planner, Trial
from loramux.simulator.report import Report, plot_report
from loramux.simulator.scenario import Scenario, ScenarioError, load_scenario, make_scenario, scenario_names
from loramux.simulator.service_gap import ServiceGap
from loramux.simulator.simulation import Simulation, Stalled
from loramux.simulator.traffic import model_of, read_workload

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
