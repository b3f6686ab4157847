"""The parity stage: the code that serves must compute what PEFT computes, in float32, on the base's own weights.

`layers` always runs: PEFT's own linears against ours, for the adapted linears of three sampled layers, on the same
inputs and the checkpoint's weights. `whole_model` also runs where the base is small enough to be held twice: a few
greedy tokens of the engine itself against PEFT's forward. For larger bases `layer_by_layer` compares what the serving
engine answered; PEFT's forward then holds one layer at a time. `verdict` says when two results count as equal,
`comparison` joins both to a report, and `worker` is the process's entry point.
"""
