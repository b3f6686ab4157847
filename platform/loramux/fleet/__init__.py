"""The engines of a base model, used as one engine: the choice of an engine for a request, the continuation of requests
after an engine's death, and restarts.

    group                           the engines of a base: requests go on when one of them dies
    member                          one engine over its lives
    launching   ray_driver          processes, engines that listen elsewhere, actors of Ray
    serving     sessions            the engine's end of a channel between machines
    remote                          the server's end
    wire                            frames and keys of the channel
    router   placement              which engine, and which engines keep an adapter or a prefix
    shares   autoscaling            in whose turn, how many
    view                            an engine by its statistics, and by what was sent to it since

`router`, `placement`, `shares` and `autoscaling` decide only from views and get the time as an argument, so the
simulator runs the same code. The modules above them hold everything with processes and messages.
"""
