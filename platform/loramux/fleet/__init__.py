"""The engines of a base model, used as one engine: the choice of an engine for a request, the continuation of requests
after an engine's death, and restarts.

    group                           the engines of a base: requests go on when one of them dies
    member                          one engine over its lives
    launching   ray_driver          processes, engines that listen elsewhere, actors of Ray
    serving     sessions            the engine's end of a channel between machines
    remote                          the server's end
    wire                            frames and keys of the channel
    router   shares   autoscaling   which engine, in whose turn, how many
    view                            an engine by its statistics

`router`, `shares` and `autoscaling` decide only from views and get the time as an argument, so the simulator runs the
same code. The modules above them hold everything with processes and messages.
"""
