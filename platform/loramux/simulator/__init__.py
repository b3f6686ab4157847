"""The engine's own scheduler, run against a model of a device: policies, bounds and capacity without a GPU."""
