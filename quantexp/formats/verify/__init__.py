"""`quantexp verify`: every kernel against exact arithmetic and against other implementations, bit for bit.

    rational   the formats in Fractions and Python's integers, value by value
    exact      the same over whole tensors, in numpy where it is exact; held against `rational`
    oracles    what others publish: ml_dtypes, gfloat, en_dtypes, torchao, torch's casts
    cases      what is asked: all codes, all 16-bit values, hard blocks, every option
    kernels    who is asked
    suite      puts them together; `certificate` keeps what came out

Nothing in `rational`, `exact`, `grids`, `draws` and `walsh` is taken from `quantexp.formats`.
"""
