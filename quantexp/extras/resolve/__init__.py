"""`quantexp branch`: schemes against bf16 on short branches from checkpoints, where small differences can be told."""

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
    about = "checkpoints to branch from (default: all that every run has)"
    parser.add_argument("--from", dest="start", metavar="A,B", help=about)
    about = f"held-out tokens of a checkpoint, other ones for each (default {TOKENS:,})"
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=about)
    about = f"nats within which a scheme counts as equivalent (default {MARGIN})"
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="NATS", help=about)
    about = "what chance does: chaos (last bits), noise (the scheme's error with random signs)"
    parser.add_argument("--control", default="chaos", metavar="A,B", help=f"{about}, none")
    add_config_dir(parser)
    add_json(parser)


BRANCH = Verb(
    "compare schemes on short branches from checkpoints",
    "[--steps A,B] [--from A,B] [--tokens N] [--margin NATS] [--control A,B] [--json] RUN ... "
    "quant=SCHEME,... [against=SCHEME] [dry_run=true] [out=FOLDER] [paths.root=FOLDER] "
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

EXTRA = Extra({"branch": BRANCH})
