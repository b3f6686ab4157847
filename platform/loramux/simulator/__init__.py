"""The engine's own scheduler, run against a model of a device: policies, bounds and capacity without a GPU.

    planner       the fewest GPUs that meet a workload's goals
    simulation    the loop: engines, the fleet's router, requests that come
    engine        one engine: the real scheduler over a modelled disk, link and device
    report        times, the service gap, the figures
    traffic       the requests: drawn from clients, or read from a log
    scenario      what is simulated
    hardware      devices and models as numbers, and the time of a step

A step takes no real time: its duration is computed from its work, and the clock is advanced by it. Everything else
(admission, eviction, preemption, routing) is the code that serves.
"""
