"""The operators as Triton kernels: one operator, one module, each launcher with the public operator's signature.

Importable where triton is. Every launcher first makes `Launch`es, plain data, and then runs them: the same data is what
`loramux_kernels.compile_check` compiles where no GPU is.
"""
