"""The operators as Triton kernels, in modules like the public ones; each launcher has the public operator's signature.

Attention and LoRA launches are *persistent*: a fixed number of programs walks through a list of work items that the
host makes once a step (`work_lists`). Every layer reads the same list. The list's length is on the device, so one CUDA
graph serves steps of any mix. The other kernels have one program for each token, row or block.

The package can be imported if triton is installed. Every launcher first makes `Launch`es, which are plain data, and
then runs them. `tools/compile_check.py` compiles the same data on machines without a GPU.
"""
