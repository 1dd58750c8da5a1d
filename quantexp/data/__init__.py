"""From raw text to training data: preparation, tokenizers, Megatron's .bin/.idx pairs, the built-in samples.

    raw text -> prepare (sources, tokenizer) -> PREFIX.bin, .idx, .json (binary, prepared)
      -> the training room's data loader (GPTDataset's order; blends), batches

`wikitext` converts Wikipedia's markup, in the language of a wiki (`wiki_names`), for `sources`; `sample` provides text
if the user has no data. Importing this package imports neither torch nor Megatron.
"""
