"""Measures captured tensors: each is read once, and its numbers are a row of one table, `measures.jsonl`.

Every figure, table and page takes its numbers from such rows. The table lies with the figures (a run's `figures/`, or
the output folder of `quantexp draw`) and has a line of JSON for each tensor, appended when the tensor is measured:

    name          the tensor: its file without suffix, or what its statistics are of; of several runs, RUN/NAME
    key           digest of the tensor (its line in the manifest, and of each of its files the size, time and hash), and
                  of the code that measures and draws: a line with another key is measured again
    files         the figures of this tensor that are drawn
    record        counts, moments and quantiles of the stored values, with shape and dtype (`counted`)
    measured      moments of the whole tensor, channels, heads, and what each format leaves of it (`measured`)
    request       what `measured` was asked for: formats of operands in the working precision, elements of each operand,
                  whether channels, heads and the other axis are left out

`record` and `measured` are there as far as a command needed them: the picture at the end of a run needs operands alone.
A picture or chapter has a line with `name`, `key` and `files`. The last line of a name counts; a torn one is skipped.

counted    the values of a tensor, counted
operand    one operand under one format: errors, scale exponents, codes
hif8       HiFloat8's codes by exponent
outliers   channels and heads that stand out
measured   all measures of one tensor, from its values or its statistics alone
row        the row of a tensor, and its JSON
table      the file
"""
