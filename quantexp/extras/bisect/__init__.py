"""`quantexp bisect`: the slots that a run's trouble comes from, by replays or by gradients of one iteration."""

from __future__ import annotations

import argparse

from quantexp.extra import Extra, Service, Verb

_USAGE = (
    "[--gradient] [--from ITERATION] [--steps K] [--by A,B] [--measure NAME] [--margin NATS] "
    "[--deviations K] [--threshold D] [--chance N] [--json] RUN [out=FOLDER] [paths.root=FOLDER] "
    "[launcher.key=value ...]"
)
_MORE = """\
Replays the iterations before the trouble from a checkpoint with its training
state (checkpoint.every=N checkpoint.optimizer=true), with parts of the scheme
in bf16, and writes the rule that keeps the culprit in bf16. Replays are runs
in runs/bisect/RUN; the same command goes on where it was interrupted."""
#: What a replay is examined for.
_MEASURES = ("nonfinite", "loss", "grad_norm", "gradient")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="RUN", help="a run, or a part of its name")
    about = "one iteration: each part of the scheme alone and left out, against bf16"
    parser.add_argument("--gradient", action="store_true", help=about)
    about = "replay from this checkpoint; 0: the beginning (default: the newest before the trouble)"
    parser.add_argument("--from", type=int, dest="start", metavar="ITERATION", help=about)
    about = "iterations to replay (default: up to the trouble)"
    parser.add_argument("--steps", type=int, metavar="K", help=about)
    about = "what is turned off together: slot, product, site, module, layer (default slot)"
    parser.add_argument("--by", default="slot", metavar="A,B", help=about)
    about = "what counts as trouble (default: from the dossier or the metrics)"
    parser.add_argument("--measure", choices=_MEASURES, help=about)
    about = "loss: nats above the replay in bf16 (default: from the run's losses)"
    parser.add_argument("--margin", type=float, metavar="NATS", help=about)
    about = "grad_norm: robust deviations above its recent past (default: the trigger's)"
    parser.add_argument("--deviations", type=float, metavar="K", help=about)
    about = "gradient: distance to bf16 that is trouble (default: half the scheme's)"
    parser.add_argument("--threshold", type=float, metavar="D", help=about)
    about = "replays from weights moved in last bits, of the scheme and of bf16 each (default 2)"
    parser.add_argument("--chance", type=int, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")


BISECT = Verb(
    "find the quantised slots that a run's trouble comes from",
    _USAGE,
    (
        "bisect linear_mxfp4-1a2b3c4d",
        "bisect linear_mxfp4 --from 400 --steps 60 --by layer",
        "bisect linear_mxfp4 --gradient --by layer,slot",
    ),
    _MORE,
    module="quantexp.extras.bisect.verb",
    add_arguments=_add_arguments,
    words=("out=", "paths.root=", "launcher.", "memory=ignore"),
    takes_runs=True,
)

EXTRA = Extra(
    {"bisect": BISECT},
    {
        Service.GRADIENT_RUN: "quantexp.extras.bisect.gradient_run:compare_gradients",
        Service.GRADIENT_COMPARISON: "quantexp.extras.bisect.gradient_run:compare_in_loop",
    },
)
