"""`quantexp verify`: compares every kernel with exact arithmetic and with other implementations, bit for bit.

    gold       the exact gold: any format in Fractions, from its definition, value by value
    exact      the same over whole tensors, in numpy where that is exact; checked against the gold (`gold_check`)
    oracles    published implementations: ml_dtypes, gfloat, en_dtypes, torchao, torch's casts
    cases      test tensors: all codes, all 16-bit values, hard blocks, every option
    kernels    the kernels under test
    suite      runs the comparisons; `quantexp.formats.certificate` stores the results

`gold`, `rational`, `exact`, `grids`, `draws` and `walsh` import nothing from `quantexp.formats`.
"""

from quantexp.extra import Extra, Service
from quantexp.extras.verify.arguments import VERIFY

EXTRA = Extra(
    {"verify": VERIFY}, {Service.HARD_TENSORS: "quantexp.extras.verify.cases:hard_tensors"}
)
