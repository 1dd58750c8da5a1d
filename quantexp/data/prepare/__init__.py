"""From raw text to a .bin/.idx pair for training: `quantexp prepare`.

    inputs -> shards (whole records, in order) -> work (in parallel: parse, filter, tokenise)
      -> outputs (one for each shard) -> finish (joined in order: one pair and its card)

A shard is about 4 MiB of an input, also of a compressed one, which one process unpacks. The outputs are joined in the
order of the input, so the bytes of the result do not depend on the number of workers. An output that exists is
complete: to resume is to make the others. Memory is that of the shards in progress. Imports neither torch nor Megatron.
"""
