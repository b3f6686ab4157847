"""The operators as Triton kernels, in modules like the public ones; each launcher has the public operator's signature.

Attention and LoRA launches are *persistent*: a fixed number of programs walks through a list of work items that the
host cuts once a step (`work_lists`). Every layer reads the same list, whose length stands on the device, so a CUDA
graph serves steps of any mix. The others have one program for each token, row or block.

Importable where triton is. Every launcher first makes `Launch`es, plain data, and then runs them: the same data is
what `tools/compile_check.py` compiles where no GPU is.
"""
