"""`quantexp verify`: compares every kernel with exact arithmetic and with other implementations, bit for bit.

    gold       the exact gold: any format in Fractions, from its definition, value by value
    exact      the same over whole tensors, in numpy where that is exact; checked against the gold (`gold_check`)
    oracles    published implementations: ml_dtypes, gfloat, en_dtypes, torchao, torch's casts
    cases      test tensors: all codes, all 16-bit values, hard blocks, every option
    kernels    the kernels under test
    suite      runs the comparisons; `quantexp.formats.certificate` stores the results

`gold`, `rational`, `exact`, `grids` and `draws` import nothing from `quantexp.formats`.
"""

from __future__ import annotations

import argparse

from quantexp.cli.flags import add_json
from quantexp.extra import Extra, Service, Verb


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a format of your own; paths.cache=FOLDER: where the certificate is kept"
    parser.add_argument("words", nargs="*", metavar="FILE.yaml", help=about)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this (default: all)")
    parser.add_argument("--formats", metavar="A,B", help="only these (no certificate)")
    about = "compare its quantizers instead, on the GPU"
    parser.add_argument("--backend", choices=("transformer_engine",), help=about)
    add_json(parser)


VERIFY = Verb(
    "check the number formats of this machine against exact arithmetic",
    "[--device cpu|cuda] [--formats A,B] [--json] [FILE.yaml ...] [paths.cache=FOLDER] | --backend "
    "transformer_engine [--json]",
    (
        "verify",
        "verify --device cpu --formats mxfp8,hifp8",
        "verify mine/format/e3m3.yaml",
        "verify --backend transformer_engine",
    ),
    module="quantexp.extras.verify.verb",
    add_arguments=_add_arguments,
    words=("paths.cache=",),
)

EXTRA = Extra(
    {"verify": VERIFY}, {Service.HARD_TENSORS: "quantexp.extras.verify.cases:hard_tensors"}
)
