"""Execution: one planned step becomes model forward passes and sampled tokens, on a CPU or a GPU.

    Runner.launch(step)
        pack        rows of one adapter side by side, no padding; positions, slots and tables as arrays
        forward     embedding, layers (attention over pages, linears with LoRA), head: loramux_kernels
        sample      a token for each sequence that has reached its last one

**The model is transformers' own.** Its modules run on a packed batch `[1, total_tokens]`: the rows of all sequences one
after the other, without padding. Only some modules are replaced. Linears, the embedding and the head add every row's
own LoRA (`loramux_adapters.modules`). Decoder layers whose parts are all known become layers with fewer operators
(`fused_layers`). In the other layers attention is one registered function over pages of KV (`attention`). Linear
attention and Mamba 2 keep their states in the same pages (`states`). Logits are computed only for rows that sample or
are scored (`logits_to_keep`). So a new architecture needs no model code. It needs a row in `loramux_adapters.families`,
and a test that compares its tokens with transformers'.

**A row's result depends on its own sequence only.** Rows of one adapter are contiguous and served by segments. Every
sequence reads its own pages. Rotary factors do not depend on the longest sequence. A sampled token depends on its
request's own seed. On a CPU, sums run in one fixed order, whatever other rows the step has.

**A GPU never waits for the host.** A step is launched before the tokens of the previous step are known
(`AsyncPipeline`). A plain decode step is one CUDA graph launch; for other steps the operators before and after the
decoder are launched separately (`cuda_graphs`).

The modules, each importing only those below it or in its row:

    loader                                    a checkpoint becomes a model with a runner
    rank_team   rank_worker                   several processes, each with a share of the weights
    assembly                                  linears that serve adapters, fused layers, the pool
    gpu_runner   cuda_graphs   step_buffers   steps on a GPU
    multi_token                               drafts of the base's own head
    runner                                    packing, the forward, pooling; steps on a CPU
    sampler   device_sampler   constraints    choosing tokens, on the host and on the device
    memory_plan                               what fits the device, before the weights are read
    checkpoint                                a transformers model, refused where it would be served wrong
    multi_token_checkpoint                    the head that drafts, in a checkpoint
    quantized_checkpoint                      linears that are saved as codes
    sharded_checkpoint                        the part of a checkpoint that one rank reads
    attention   states   fused_layers         layers over the page pool

Sources: Orca (Yu et al., 2022) for batching by iteration, vLLM (Kwon et al., 2023) for paged KV, Sarathi-Serve (Agrawal
et al., 2024) for prefill chunks in decode steps, Punica and S-LoRA (2023) for many adapters in one batch.
"""
