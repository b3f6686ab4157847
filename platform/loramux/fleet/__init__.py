"""Engines of a base model, as one: where a request goes, what happens if an engine dies, and how the next one starts.

    group                           the engines of a base: requests go on when one of them dies
    member                          one engine over its lives
    launching   ray_driver          processes, engines that listen elsewhere, actors of Ray
    serving     sessions            the engine's end of a channel between machines
    remote                          the server's end
    wire                            frames and keys of the channel
    router   shares   autoscaling   which engine, in whose turn, how many
    view                            an engine by its statistics

`router`, `shares` and `autoscaling` decide on views alone and get the time as an argument, so the simulator runs the
same code. The modules above them hold everything with processes and messages.
"""
