"""In a sandbox of its own: does what will be served give what PEFT gives, in float32, on the same weights?

A base that is small enough is run whole: a few greedy tokens by the engine itself, held against PEFT's forward. Of a
larger one some layers are: PEFT's own linears against ours, on the same inputs and the checkpoint's weights.
"""
