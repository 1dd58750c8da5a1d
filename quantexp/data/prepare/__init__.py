"""From raw text to a .bin/.idx pair for training: `quantexp prepare`.

    inputs -> chunks (whole records, in order) -> work (in parallel: parse, filter, tokenise)
      -> parts (train, validation, test, written in order) -> finish (one pair and its card)

One process reads and one writes, in the order of the input; only the work in between is parallel. The bytes of the
result therefore do not depend on the number of workers, and the position in the input and the lengths of the files
suffice to resume after an interruption. Memory is that of the chunks in progress. Imports neither torch nor Megatron.
"""
