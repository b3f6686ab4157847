"""A deterministic simulation of the whole server below HTTP: one virtual clock, one seed, faults injected."""
