"""What happened in a run, and what happens: the ring and its dossiers, `quantexp capture` and `quantexp watch`."""

from __future__ import annotations

import argparse

from quantexp.cli.flags import add_runs
from quantexp.extra import Extra, Service, Verb


def _watch(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    about = "the port (default: the last, or any)"
    parser.add_argument("--port", type=int, metavar="N", help=about)


def _capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run, or a part of its name")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is written")


WATCH = Verb(
    "show runs in the browser while they run: losses, numerics, states",
    "[--port N] [DIR] [paths.root=FOLDER]",
    ("watch", "watch runs/sweeps/20261122_035435.json", "watch --port 8000"),
    module="quantexp.extras.forensics.watch.verb",
    add_arguments=_watch,
    words=("paths.root=",),
    takes_runs=True,
)
CAPTURE = Verb(
    "let a running run write what it computes now",
    "[--no-wait] RUN [paths.root=FOLDER]",
    ("capture FA_mxfp8-1a2b3c4d", "capture FA_mxfp8 --no-wait"),
    "All tensors of its next iteration, the tokens, and the statistics of the last\n"
    "ones with capture.ring=N, in its folder dossiers/.",
    module="quantexp.extras.forensics.capture",
    add_arguments=_capture,
)

EXTRA = Extra(
    {"watch": WATCH, "capture": CAPTURE},
    {
        Service.DOSSIERS: "quantexp.extras.forensics.dossiers:Dossiers",
        Service.RING_PRICE: "quantexp.extras.forensics.ring.price:ring_and_dossier_bytes",
        Service.SHOWN_DOSSIERS: "quantexp.extras.forensics.shown:shown_dossiers",
    },
)
