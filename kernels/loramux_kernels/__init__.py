"""Operators of the engine: segmented LoRA, paged attention, sampling; torch (and, on a GPU, triton) only."""
