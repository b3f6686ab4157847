"""PEFT files become a validated adapter, and its weights become resident in pages of the pool.

The way of an adapter:

1. Read. `config` parses adapter_config.json strictly (`strict_json`) and refuses unserved fields with an error that
   names the field and the way out; `weights_file` parses the safetensors header. Both are bounded before anything is
   built.
2. Plan. `base` describes the served model from its config.json. `targets` finds the targets of the configuration:
   modules, by PEFT's rules and in bounded time (`matching`), and rows of tokens. `plan` derives the exact `components`
   (pairs, vectors, rows), compares them with the file, and reads every value once. `convert` turns adapters of other
   kinds, and LoRAs in another spelling (`names`), into a LoRA first.
3. Load. `weights` reads the tensors in the serving dtype and cuts the matrices into blocks that fill pages;
   `base_weights` fits them to the base (DoRA's lengths). With tensor parallelism a rank holds a share of the base
   (`sharding`) and of each adapter (`ranks`).
4. Place. `prepared` composes the pages for a GPU. `bank` copies them, or on a CPU the blocks, into the pool and writes
   the tables from which the kernels find them. Changes that do not fit these tables are described separately
   (`ResidentAdapter`).
5. Serve. `modules` replaces the model's linears, norms, embedding and head, `experts` its mixtures, and `latent` the
   linear that expands a compressed KV, by modules that add the adapters of the running step.

Importing the package imports no torch: files are checked without it. `weights` and the modules built on it hold
tensors. The package does not import loramux; see `errors`.
"""
