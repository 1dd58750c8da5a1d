"""Schemes at the checkpoints of bf16 runs, where small differences can be told: `quantexp branch` and `gradient`.

branch      held-out losses of short branches
gradient    errors of gradients, without training
"""

from __future__ import annotations

import argparse

from quantexp.cli.flags import add_config_dir, add_json
from quantexp.extra import Extra, Verb

_MORE = """\
From each checkpoint of each run (one a seed), every scheme trains the same
steps on the same data, from the same weights and optimizer state. The loss on
fresh held-out text, paired with that of bf16, says what a scheme changes; the
spread over seeds, what can be told. dry_run=true plans: branches, time, bytes,
and the smallest gap that the design detects. The same command goes on where
it was interrupted, and more runs add to what is there."""
#: The default horizons, in steps.
STEPS = "10,20,50"
#: Tokens of a unit's held-out text: 8,192 are an error of 6e-4 nats that all units share.
TOKENS = 32_768
#: Nats: the gap that published claims about formats are about.
MARGIN = 0.001


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "runs with checkpoints, one a seed; schemes (quant=a,b), and key=value"
    parser.add_argument("words", nargs="+", metavar="RUN", help=about)
    about = f"horizons: steps after which a branch is measured (default {STEPS})"
    parser.add_argument("--steps", default=STEPS, metavar="A,B", help=about)
    about = "steps before these that fill the optimizer's moments and leave the weights (default 0)"
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help=about)
    about = "checkpoints to branch from (default: all that every run has)"
    parser.add_argument("--from", dest="start", metavar="A,B", help=about)
    about = f"held-out tokens of a checkpoint, other ones for each (default {TOKENS:,})"
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=about)
    about = f"nats within which a scheme counts as equivalent (default {MARGIN})"
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="NATS", help=about)
    about = "what chance does: chaos (last bits), noise (the scheme's error with random signs)"
    parser.add_argument("--control", default="chaos", metavar="A,B", help=f"{about}, none")
    _add_looks(parser)
    add_config_dir(parser)
    add_json(parser)


def _add_looks(parser: argparse.ArgumentParser) -> None:
    about = "numbers of seeds at which the design is judged, planned before the first"
    parser.add_argument("--looks", metavar="A,B", help=f"{about} (default: once)")


BRANCH = Verb(
    "compare schemes on short branches from checkpoints",
    "[--steps A,B] [--warm-up N] [--from A,B] [--tokens N] [--margin NATS] [--control A,B] [--looks A,B] [--json] "
    "RUN ... quant=SCHEME,... [against=SCHEME] [dry_run=true] [out=FOLDER] [paths.root=FOLDER] "
    "[launcher.key=value ...]",
    (
        "branch runs quant=linear_mxfp8,linear_mxfp4",
        "branch runs quant=linear_mxfp8,linear_mxfp4 dry_run=true",
        "branch bf16-1a2b bf16-3c4d --steps 20,50 --from 200 quant=linear_mxfp8",
        "branch runs quant=linear_mxfp8 quant.linear.scale_rule=floor,rceil",
    ),
    _MORE,
    module="quantexp.extras.resolve.verb",
    add_arguments=_add_arguments,
    words=("quant=", "against=", "dry_run=true", "out=", "paths.root=", "launcher."),
    takes_runs=True,
)

_GRADIENT_MORE = """\
At each checkpoint of each run (one a seed), every scheme's gradient is held
against that in fp32, on the same weights and batches: error, cosine, squared
bias and variance, raw and divided by Adam's root v, for the scheme, its parts
alone, and by layer. dry_run=true plans: passes, time, memory. The same command
goes on where it was interrupted, and more runs add to what is there."""
#: Of a checkpoint: 28 pairs, whose products are the squared bias.
BATCHES = 8
#: A twentieth of the baseline's error.
GRADIENT_MARGIN = 0.05


def _add_gradient_arguments(parser: argparse.ArgumentParser) -> None:
    about = "runs with checkpoints, one a seed; schemes (quant=a,b), and key=value"
    parser.add_argument("words", nargs="+", metavar="RUN", help=about)
    about = "checkpoints (default: all that every run has)"
    parser.add_argument("--from", dest="start", metavar="A,B", help=about)
    about = f"batches of a checkpoint, those of the run's next steps (default {BATCHES})"
    parser.add_argument("--batches", type=int, default=BATCHES, metavar="N", help=about)
    about = "draws of the random numbers of each batch; 2 tells their variance (default 1)"
    parser.add_argument("--draws", type=int, default=1, metavar="N", help=about)
    about = "what is quantised alone: slot, product, site, module, layer; none (default product)"
    parser.add_argument("--by", default="product", metavar="A,B", help=about)
    about = f"share of the baseline's error that counts as equivalent (default {GRADIENT_MARGIN})"
    parser.add_argument("--margin", type=float, default=GRADIENT_MARGIN, metavar="X", help=about)
    _add_looks(parser)
    add_config_dir(parser)
    add_json(parser)


GRADIENT = Verb(
    "compare gradients of schemes with those in fp32",
    "[--from A,B] [--batches N] [--draws N] [--by A,B] [--margin X] [--looks A,B] [--json] RUN ... "
    "quant=SCHEME,... [against=SCHEME] [dry_run=true] [out=FOLDER] [paths.root=FOLDER] "
    "[launcher.key=value ...]",
    (
        "gradient runs quant=linear_mxfp8,linear_mxfp4",
        "gradient runs quant=linear_mxfp8,linear_mxfp4 dry_run=true",
        "gradient runs quant=linear_mxfp8,linear_mxfp4 against=linear_mxfp8",
        "gradient runs quant=linear_mxfp4 --by slot --batches 16",
    ),
    _GRADIENT_MORE,
    module="quantexp.extras.resolve.gradient.verb",
    add_arguments=_add_gradient_arguments,
    words=("quant=", "against=", "dry_run=true", "out=", "paths.root=", "launcher."),
    takes_runs=True,
)

EXTRA = Extra({"branch": BRANCH, "gradient": GRADIENT})
