"""Raw text to a .bin/.idx pair that training reads: `quantexp prepare`.

    inputs -> chunks (whole records, in order) -> work (in parallel: parse, filter, tokenise)
      -> parts (train, validation, test, written in order) -> finish (one pair and its card)

One process reads and one writes, in the order of the input; only the work between is spread. So
the bytes of the result do not depend on the number of workers, and all that has to be kept to go
on after an interruption is how far the input was read and how long the files were then. Memory
is that of the chunks under way. Nothing here imports torch or Megatron.
"""
