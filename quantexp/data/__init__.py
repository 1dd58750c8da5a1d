"""Text to training batches: sources, tokenizers, Megatron's .bin/.idx pairs, the built-in samples.

    sources -> Document -> tokenizer -> binary (.bin/.idx) -> loader (GPTDataset, batches)

`wikitext` is what `sources` needs to read Wikipedia, `sample` what stands in where the user has
no data. Importing this package, `sources`, `tokenizer`, `binary` or `sample` imports neither
torch nor Megatron; `loader` imports both.
"""
