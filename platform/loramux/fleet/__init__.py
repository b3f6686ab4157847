"""Engines of a base model, as one: where a request goes, what happens when an engine dies, and how the next one starts.

`view` describes an engine by its statistics; `router`, `shares` and `autoscaling` decide on views alone, with the time
passed in, so that the simulator runs the same code. Everything with processes and messages is above them.
"""
