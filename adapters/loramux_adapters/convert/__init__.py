"""Adapters of other kinds become, at upload, the LoRA that computes exactly the same.

`renaming` rewrites a LoRA in another spelling to the one that PEFT 0.21 writes. `kind` is the protocol of a convertible
kind; `self_contained` and `base_dependent` implement the kinds by their algebra, the latter with the base's weights;
`conversion` matches targets, checks and bounds the file, and writes the LoRA.
"""
