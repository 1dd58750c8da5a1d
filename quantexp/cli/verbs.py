"""The verbs of the command line: purpose, arguments, flags and examples of each. Needs no torch.

`VERBS` are those of the core; `all_verbs` adds those of the installed extras.
"""

from __future__ import annotations

import argparse
from functools import cache

from quantexp.analysis.draw.arguments import USAGE as DRAW_USAGE
from quantexp.analysis.draw.arguments import add_arguments as add_draw_arguments
from quantexp.cli.flags import SHELLS, add_config_dir
from quantexp.errors import ConfigError
from quantexp.extra import GROUP, INSTALL, Verb, extras

#: The first word of a call from a shell that completes a command line.
COMPLETE = "__complete"
#: What may be changed of a run that exists: how these words begin.
CHANGEABLE = ("launcher.", "parallel.", "checkpoint.", "memory=", "code=", "training.restart=")
_CHANGES = (
    "[launcher.key=value ...] [parallel.key=value ...] [checkpoint.key=value ...] [memory=ignore] "
    "[code=current] [training.restart=true]"
)


def _draw(parser: argparse.ArgumentParser) -> None:
    add_draw_arguments(parser)
    add_config_dir(parser)


#: The verbs of the core.
VERBS = {
    "train": Verb(
        "run an experiment (the verb may be left out)",
        "[-m] group=choice key=value ...",
        (
            "model=llama32-1b dataset=wikipedia quant=FA_linear_mxfp8 training=fast",
            "-m model=llama32-1b dataset=wikipedia 'quant=glob(*)' training=fast",
            "-m +experiment=ten_schemes sweep.seeds=3 training=fast",
            "quant=FA_mxfp8 quant/pv=hifp8 training=fast",
            "--config-dir mine quant=my_scheme training=fast",
        ),
        "Groups: model, dataset, quant (the scheme), quant/linear, quant/qk, quant/pv,\n"
        "quant/output, capture, training, launcher, +experiment; quantexp list shows\n"
        "their choices.\n"
        "A value with a character that the shell reads stands in single quotes.",
    ),
    "plan": Verb(
        "show what would run: precision map, memory, time; run nothing",
        "[-m] [--maps] [--json] group=choice key=value ...",
        (
            "plan model=llama32-1b quant=FA_linear_mxfp8 training=fast",
            "plan quant=FA_linear_mxfp4 --json",
            "plan -m 'quant=glob(*)' training=fast",
            "plan quant=linear_mxfp8 device=h100",
        ),
        "Needs neither data nor a GPU. device=NAME: what\nTransformer Engine would run there.",
    ),
    "list": Verb(
        "list models, datasets, schemes, formats, presets, ..., or runs",
        "[--json] [KIND ...]",
        ("list", "list schemes", "list formats --json", "--config-dir mine list schemes"),
        "Without a KIND the names of everything but the runs.",
    ),
    "status": Verb(
        "show which runs wait, run or have ended, and why",
        "[--watch | --json] [DIR] [paths.root=FOLDER]",
        ("status", "status --watch", "status FA_mxfp8-1a2b3c4d"),
        module="quantexp.cli.ledger",
    ),
    "logs": Verb(
        "show what a run printed",
        "[--rank N] [-f] RUN [paths.root=FOLDER]",
        ("logs FA_mxfp8-1a2b3c4d", "logs -f FA_mxfp8 --rank 1"),
        module="quantexp.cli.ledger",
    ),
    "resume": Verb(
        "go on with what was interrupted or is missing",
        f"[DIR] [paths.root=FOLDER] {_CHANGES}",
        (
            "resume",
            "resume FA_mxfp8-1a2b3c4d launcher.time_min=600",
            "resume FA_mxfp8-1a2b3c4d parallel.tensor=1",
        ),
        "A run with checkpoints (checkpoint.every=N checkpoint.optimizer=true) goes on\n"
        "from the last one; training.restart=true starts over, code=current takes the\n"
        "present source. What waits, runs or has completed is left alone.",
    ),
    "retry": Verb(
        "start again what failed",
        f"[DIR] [paths.root=FOLDER] {_CHANGES}",
        ("retry", "retry FA_mxfp8-1a2b3c4d"),
        module="quantexp.cli.resume",
    ),
    "cancel": Verb(
        "end runs that wait or run",
        "[DIR] [paths.root=FOLDER]",
        ("cancel", "cancel FA_mxfp8-1a2b3c4d"),
        module="quantexp.cli.ledger",
    ),
    "compare": Verb(
        "compare runs with bf16: losses, gaps, speed, what differs",
        "[--json] RUN ... [measure=NAME] [window=N] [against=SCHEME] [out=FOLDER] [paths.root=FOLDER]",
        (
            "compare runs",
            "compare bf16 FA_mxfp8 out=figures",
            "compare runs measure=grad_norm window=50",
            "compare runs against=linear_mxfp8",
        ),
        "Gaps are of the mean over the last window=N iterations, by default a tenth;\n"
        "measure: loss, validation_loss, unquantised_loss, perplexity, grad_norm.\n"
        "against: another scheme than bf16. Writes compare/compare.png and .pdf, or\n"
        "below out=FOLDER.",
    ),
    "report": Verb(
        "write one page about runs that works offline, report.html",
        "DIR ... [out=PATH] [paths.root=FOLDER]",
        ("report FA_mxfp8-1a2b3c4d", "report runs out=report.html"),
    ),
    "captures": Verb(
        "list, check or export captured tensors",
        "[--list] [--check] [--export FOLDER [--to KIND]] [--json] DIR [key=pattern ...] "
        "[paths.root=FOLDER]",
        (
            "captures FA_mxfp8-1a2b3c4d",
            "captures FA_mxfp8 --list layer=0 tensor=grad_*",
            "captures FA_mxfp8 --export tensors --to npz",
        ),
    ),
    "draw": Verb(
        "draw figures and statistics of captured tensors",
        " ".join(DRAW_USAGE.split()).removeprefix("quantexp draw "),
        (
            "draw FA_mxfp8-1a2b3c4d",
            "draw FA_mxfp8 layer=0-3 --only distributions out=draw",
            "draw runs out=draw launcher=slurm launcher.max_parallel=8",
        ),
        add_arguments=_draw,
    ),
    "export": Verb(
        "write a saved model as published models are, or for Megatron-LM",
        "RUN format=hf|megatron_lm [iteration=N] [out=FOLDER] [paths.root=FOLDER]",
        ("export FA_mxfp8-1a2b3c4d format=hf", "export FA_mxfp8 format=hf iteration=500 out=model"),
    ),
    "doctor": Verb("check what this machine can run", "[--json]", ("doctor", "doctor --json")),
    "completion": Verb(
        "print what makes a shell complete verbs, keys, choices and runs",
        "|".join(SHELLS),
        ("completion bash", "completion zsh", "completion fish"),
        'In ~/.bashrc:                    eval "$(quantexp completion bash)"\n'
        'In ~/.zshrc, after compinit:     eval "$(quantexp completion zsh)"\n'
        "In ~/.config/fish/config.fish:   quantexp completion fish | source",
    ),
    "help": Verb(
        "show the help of a verb",
        "[VERB]",
        ("help", "help plan"),
    ),
}

#: The verbs as the help lists them; those of extras that are not installed are left out.
GROUPS = {
    "experiments": ("train", "plan", "prepare", "list"),
    "runs": ("status", "watch", "logs", "capture", "resume", "retry", "cancel"),
    "results": (
        "compare",
        "branch",
        "gradient",
        "report",
        "captures",
        "draw",
        "requantise",
        "evaluate",
        "bisect",
        "export",
    ),
    "this machine": ("doctor", "verify", "completion", "help"),
}


@cache
def all_verbs() -> dict[str, Verb]:
    """The verbs of the core and of the installed extras, as the help lists them.

    Raises:
        ConfigError: an extra has a verb of the core, or two have the same.
    """
    of_extras: dict[str, Verb] = {}
    for name, extra in extras().items():
        for word, verb in extra.verbs.items():
            if word in VERBS or word in of_extras:
                raise ConfigError(f"the extra {name} has the verb {word}, which there is already")
            of_extras[word] = verb
    known = {**VERBS, **of_extras}
    return {**{word: known[word] for word in _listed() if word in known}, **known}


def verb_groups() -> dict[str, tuple[str, ...]]:
    """The installed verbs below the titles of the help; those of other packages come last."""
    verbs = all_verbs()
    listed = {title: tuple(w for w in words if w in verbs) for title, words in GROUPS.items()}
    others = tuple(word for word in verbs if word not in _listed())
    return {**listed, **({"other packages": others} if others else {})}


def _listed() -> list[str]:
    return [word for words in GROUPS.values() for word in words]


def is_verb(word: str) -> bool:
    """Whether a word is a verb, if its extra is installed."""
    return word in VERBS or word in _listed() or ("=" not in word and word in all_verbs())


def verb_named(word: str) -> Verb:
    """The verb of a word that is one.

    Raises:
        ConfigError: it is that of an extra that is not installed.
    """
    verb = VERBS.get(word) or all_verbs().get(word)
    if verb is None:
        raise ConfigError(
            f"{word} is not installed: no entry point of the group {GROUP} has this verb; {INSTALL}"
        )
    return verb
