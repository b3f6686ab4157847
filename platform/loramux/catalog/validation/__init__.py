"""Checks of uploads in sandboxed processes, before the uploads are served.

If a server has several bases and the upload names none, the base that the files fit is chosen first (`files`). An
upload then passes up to three stages, each in a process that is forked for the job and limited by the kernel:

1. `files`: the two files against the base's description. No torch, no weights of the base; milliseconds.
2. `conversion`: adapters of other kinds (LoHa, VeRA, ...) become the LoRA that computes the same, and go through 1.
3. `parity`: the code that serves against PEFT, in float32, on the base's own weights.

`validator` runs the stages and joins their reports; `sandbox` has both ends of a stage, and `jail` limits what a job
can access. The server's own process never parses an uploaded byte before stage 1 has passed.
"""
