"""Text to training batches: raw text prepared, tokenizers, Megatron's .bin/.idx pairs, the built-in samples.

    raw text -> prepare (sources, tokenizer) -> PREFIX.bin, .idx, .json (binary, prepared)
      -> loader (order: GPTDataset; blends), batches

`wikitext` is what `sources` needs to read Wikipedia, `sample` what stands in where the user has
no data. Importing this package, `sources`, `tokenizer`, `binary`, `prepared` or `sample` imports
neither torch nor Megatron; `order` and `loader` import both.
"""
