"""What the command line's words may be: the verbs, and the arguments of each. Nothing here imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from quantexp import __version__
from quantexp.analysis.draw.asked import USAGE as DRAW_USAGE
from quantexp.analysis.draw.asked import add_arguments as add_draw_arguments
from quantexp.analysis.requantise.asked import USAGE
from quantexp.analysis.requantise.asked import add_arguments as add_requantise_arguments

VERBS = {
    "train": "run an experiment (the verb may be left out)",
    "plan": "show what would run: precision map, memory, bytes, commands; run nothing",
    "list": "list models, datasets, schemes, presets, captures, experiments, or runs",
    "prepare": "raw text to the tokens that runs read: dataset=wikipedia dataset.source=FILES ...",
    "doctor": "check what this machine can run",
    "verify": "hold the number formats against exact arithmetic and other libraries, here",
    "status": "show what runs wait, run, have ended, and why: [DIR]",
    "logs": "show what a run printed: RUN",
    "resume": "start again what was interrupted or is missing: [DIR] [launcher.key=value ...]",
    "retry": "start again what failed: [DIR] [launcher.key=value ...]",
    "cancel": "end runs that wait or run: [DIR]",
    "captures": "list, check or export captured tensors: DIR [key=pattern ...]",
    "draw": "figures and statistics of captured tensors: DIR... [out=FOLDER]",
    "compare": "hold runs against bf16: losses, gaps, speed, what differs: RUN ... [out=FOLDER]",
    "report": "one page of runs that works offline, report.html: DIR ... [out=PATH]",
    "export": "write a run's saved model as published ones are: RUN format=hf [iteration=N] [out=FOLDER]",
    "requantise": "score a capture under every format and recommend a scheme: DIR [key=pattern ...]",
}

#: Verbs about runs that exist: they take folders, and of the overrides `paths.root=` alone, or the launcher's too.
LEDGER = {"status": "[DIR]", "logs": "RUN", "resume": "[DIR]", "retry": "[DIR]", "cancel": "[DIR]"}
#: Verbs about several runs, with what they write as `out=`.
SIDE_BY_SIDE = {"compare": "RUN ... [out=FOLDER]", "report": "DIR ... [out=PATH]"}
#: What `export` takes.
EXPORT = "RUN format=hf [iteration=N] [out=FOLDER]"
#: Those that start runs.
STARTS = ("resume", "retry")
#: What may be changed of a run that exists: how these words begin.
CHANGEABLE = ("launcher.", "memory=")

EXAMPLES = """\
examples:
  quantexp model=llama32-1b dataset=wikipedia quant=FA_linear_mxfp8 training=fast
  quantexp -m model=llama32-1b dataset=wikipedia 'quant=glob(*)' training=fast
  quantexp -m +experiment=ten_schemes sweep.seeds=3 training=fast
  quantexp quant=FA_mxfp8 quant/pv=hifp8 training=fast
  quantexp plan quant=FA_linear_mxfp4 --json
  quantexp list schemes
  quantexp prepare dataset=wikipedia dataset.source=dumps/ dataset.tokenizer_path=llama/
"""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of what follows a verb."""
    verbs = "\n".join(f"  {name:10} {about}" for name, about in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="quantexp" if verb == "train" else f"quantexp {verb}",
        usage=_usage(verb),
        description=f"Quantised training experiments that prove what ran.\n\nverbs:\n{verbs}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if verb == "captures":
        _captures_arguments(parser)
    elif verb == "requantise":
        add_requantise_arguments(parser)
    elif verb == "draw":
        add_draw_arguments(parser)
    elif verb in LEDGER:
        about = "a folder of runs (./runs), a run, a sweep's list, a submission; paths.root=FOLDER"
        parser.add_argument("words", nargs="*", metavar=LEDGER[verb].strip("[]"), help=about)
    elif verb in SIDE_BY_SIDE:
        about = "runs, parts of their names, a sweep's list, a folder of runs; paths.root=FOLDER"
        metavar = SIDE_BY_SIDE[verb].partition(" ")[0]
        parser.add_argument("words", nargs="+", metavar=metavar, help=about)
    elif verb == "export":
        about = "a run, or a part of its name; format=hf; paths.root=FOLDER"
        parser.add_argument("words", nargs="+", metavar="RUN", help=about)
    else:
        parser.add_argument(
            "words", nargs="*", metavar="key=value", help="choices and overrides (Hydra)"
        )
    parser.add_argument(
        "-cd",
        "--config-dir",
        type=Path,
        help="a folder with YAML files of your own, laid out as conf/",
    )
    parser.add_argument("--version", action="version", version=f"quantexp {__version__}")
    if verb in ("train", "plan"):
        parser.add_argument(
            "-m",
            "--multirun",
            action="store_true",
            help="a sweep over choices: a=x,y 'quant=glob(*)'",
        )
    if verb == "plan":
        parser.add_argument("--maps", action="store_true", help="of a sweep the precision maps too")
    if verb in (
        "plan",
        "list",
        "doctor",
        "verify",
        "status",
        "captures",
        "requantise",
        "compare",
        "prepare",
    ):
        parser.add_argument("--json", action="store_true", help="print JSON")
    if verb == "verify":
        parser.add_argument("--device", choices=("cpu", "cuda"), help="only this (default: all)")
        parser.add_argument("--formats", metavar="A,B", help="only these (no certificate)")
    if verb == "status":
        parser.add_argument("--watch", action="store_true", help="go on until all have ended")
    if verb == "logs":
        parser.add_argument("--rank", type=int, default=0, help="the process (default 0)")
        parser.add_argument("-f", "--follow", action="store_true", help="until the run has ended")
    return parser


def _captures_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a run, or a folder of captured tensors")
    parser.add_argument("words", nargs="*", metavar="key=pattern", help="only those: tensor=grad_*")
    parser.add_argument("--list", action="store_true", help="a row for each tensor")
    parser.add_argument("--check", action="store_true", help="compare every file with its hash")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="copy the tensors there")
    parser.add_argument("--to", choices=("pt", "safetensors", "npz"), default="pt")


def _usage(verb: str) -> str:
    if verb == "requantise":
        return USAGE
    if verb == "draw":
        return DRAW_USAGE
    if verb == "captures":
        return "quantexp captures [--list] [--check] [--export FOLDER [--to KIND]] [--json] DIR [key=pattern ...]"
    if verb == "verify":
        return "quantexp verify [--device cpu|cuda] [--formats A,B] [--json] [paths.cache=FOLDER]"
    if verb == "export":
        return f"quantexp export [flags] {EXPORT} [paths.root=FOLDER]"
    if verb in SIDE_BY_SIDE:
        return f"quantexp {verb} [flags] {SIDE_BY_SIDE[verb]} [paths.root=FOLDER]"
    if verb in LEDGER:
        more = " [launcher.key=value ...] [memory=ignore]" if verb in STARTS else ""
        return f"quantexp {verb} [flags] {LEDGER[verb]} [paths.root=FOLDER]{more}"
    if verb == "prepare":
        return "quantexp prepare [flags] dataset=NAME dataset.source=FILES [dataset.key=value ...]"
    return f"quantexp [{'|'.join(VERBS)}] [flags] group=choice key=value ..."
