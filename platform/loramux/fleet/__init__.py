"""Engines of a base model, as one: where a request goes, what happens when an engine dies, and how the next one starts.

    group                           the engines of a base: requests go on when one of them dies
    member                          one engine over its lives
    launching   ray_driver          processes, engines that listen elsewhere, actors of Ray
    serving     sessions            the engine's end of a channel between machines
    remote                          the server's end
    wire                            its frames and keys
    router   shares   autoscaling   which engine, in whose turn, how many
    view                            an engine by its statistics

`router`, `shares` and `autoscaling` decide on views alone, with the time passed in, so that the simulator runs the same
code. Everything with processes and messages is above them.
"""
