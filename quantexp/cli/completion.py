"""Shell completion after `quantexp`: verbs, groups and their choices, keys and their values, flags, runs.

`quantexp completion SHELL` prints a script (`quantexp/completions/`) that calls `quantexp __complete LINE`, with the
command line up to the cursor, at each press of the key. It prints the words that may stand there, each with a tab and
what it is; nothing where the shell's own completion of files serves. No torch, no OmegaConf: 0.12 s of processor time.

Other ways were considered. Hydra's own plugin composes the configuration at each press (0.7 s), and knows neither verbs
nor runs. shtab prints a script with all words in it, which knows no runs and no choices of a --config-dir. argcomplete
calls the program as this does, but what it finds out by itself are the flags; verbs after flags, key=value, choices
and runs would be written here all the same, for another dependency in place of three short scripts.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quantexp.analysis.compare.arguments import MEASURES
from quantexp.analysis.draw.arguments import FORMATS as FIGURE_FORMATS
from quantexp.cli.arguments import flags_with_value, parser_of, split_verb
from quantexp.cli.flags import FILTERS, KINDS, SHELLS
from quantexp.cli.plan_backend import DEVICE
from quantexp.cli.verbs import all_verbs, verb_named
from quantexp.config.choices import choice_files, comment, groups
from quantexp.extra import Service, service
from quantexp.folders import user_path
from quantexp.formats.definitions.files import known_names
from quantexp.runs.find import FOLDERS
from quantexp.schema import Aspect, Composition, PathsConfig
from quantexp.schema.keys import section_of

#: A word that may stand at the cursor -> what it is.
Candidates = dict[str, str]
_OF_A_START = (
    *("paths.root=", "launcher.", "parallel.", "checkpoint."),
    *("memory=ignore", "code=current", "training.restart=true"),
)
#: What the core's verbs about runs take beside them.
_BESIDE_RUNS = {
    "status": ("paths.root=",),
    "logs": ("paths.root=",),
    "resume": _OF_A_START,
    "retry": _OF_A_START,
    "cancel": ("paths.root=",),
    "compare": (
        *(f"measure={measure}" for measure in MEASURES),
        *("window=", "against=", "out=", "paths.root="),
    ),
    "report": ("out=", "paths.root="),
    "export": ("format=hf", "format=megatron_lm", "iteration=", "out=", "paths.root="),
    "captures": (*FILTERS, "phase=", "paths.root="),
    "draw": (*FILTERS, "type=", "out=", "paths.root="),
}
_WORDS: dict[str, Sequence[str]] = {
    "list": [*KINDS],
    "completion": SHELLS,
    "doctor": [],
}
_LONGEST_ABOUT = 60


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell; returns 0."""
    if len(arguments.words) != 1 or arguments.words[0] not in SHELLS:
        shells = f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
        words = " ".join(arguments.words) or "nothing"
        parser_of("completion").error(f"completion takes {shells}, got {words}")
    sys.stdout.write(script(arguments.words[0]))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell."""
    return (Path(__file__).parent / "completions" / f"quantexp.{shell}").read_text(encoding="utf-8")


def completions(line: str) -> Candidates:
    """The candidates for the last word of a command line; all begin with its typed part.

    The exception is a part of a run's name, where a single run has it in its name.
    """
    *before, prefix = _split(line)[1:] or [""]
    if before and before[-1].startswith("-") and before[-1] in flags_with_value():
        values = dict.fromkeys(_values_of_flag(split_verb(before)[0], before[-1], prefix), "")
    else:
        values = _words(before, prefix)
    beginning = {word: about for word, about in values.items() if word.startswith(prefix)}
    if not beginning and prefix and _beside_runs(split_verb(before)[0]) is not None:
        holding = [run for run in values if prefix in run and "=" not in run]
        beginning = {holding[0]: ""} if len(holding) == 1 else {}
    return beginning


def _split(line: str) -> list[str]:
    """The words of a line; the last one is unfinished, possibly empty, possibly with an open quote."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if line[-1:].isspace() and not end else words
    return line.split()


def _words(before: Sequence[str], prefix: str) -> Candidates:
    verb, rest = split_verb(before)
    if prefix.startswith("-"):
        return _flags(verb or "train")
    beside = _beside_runs(verb)
    if beside is not None:
        keys = [word.split("=")[0] for word in beside if word.startswith(_OF_A_START[1:])]
        changes = _overrides(prefix, None) if prefix.startswith(tuple(keys)) and keys else {}
        return {**dict.fromkeys([*_runs(rest), *beside], ""), **changes}
    if verb == "help":
        return _verbs()
    fixed = None if verb is None else _WORDS.get(verb, verb_named(verb).words)
    if fixed is not None:
        return dict.fromkeys(fixed, "")
    none_yet = verb is None and not any("=" in word for word in before)
    verbs = _verbs() if none_yet and "=" not in prefix else {}
    asks_for_device = verb == "plan" and DEVICE.startswith(prefix[: len(DEVICE)])
    devices = _devices() if asks_for_device else {}
    return {**verbs, **devices, **_overrides(prefix, _config_dir(rest))}


def _beside_runs(verb: str | None) -> Sequence[str] | None:
    """What may stand beside the names of runs; None of a verb that takes none."""
    if verb is None or verb in _BESIDE_RUNS:
        return _BESIDE_RUNS.get(verb or "")
    described = verb_named(verb)
    return described.words if described.takes_runs else None


def _devices() -> Candidates:
    names = service(Service.DEVICES)
    return {} if names is None else {f"{DEVICE}{name}": "" for name in names()}


def _verbs() -> Candidates:
    return {name: described.about for name, described in all_verbs().items()}


def _flags(verb: str) -> Candidates:
    shown = (action for action in parser_of(verb)._actions if action.help != argparse.SUPPRESS)
    return {
        flag: str(action.help)
        for action in shown
        for flag in action.option_strings
        if flag.startswith("--")
    }


def _values_of_flag(verb: str | None, flag: str, prefix: str) -> list[str]:
    """The values of a flag with few values; for a list (A,B), its next element."""
    actions = (action for verb in all_verbs() for action in parser_of(verb)._actions)
    allowed = next((a.choices for a in actions if flag in a.option_strings and a.choices), ())
    if flag == "--formats":
        names = FIGURE_FORMATS if verb == "draw" else sorted(known_names())
        return [_listed(prefix) + name for name in names]
    if flag == "--by":
        return [_listed(prefix) + aspect.value for aspect in Aspect]
    return [str(value) for value in allowed or ()]


def _listed(prefix: str) -> str:
    """The complete part of a list: `a,b,` of `a,b,c`."""
    return prefix[: prefix.rfind(",") + 1]


def _config_dir(words: Sequence[str]) -> Path | None:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("-cd", "--config-dir"):
            return user_path(value if equals else [*words, ""][i + 1])
    return None


def _runs(words: Sequence[str]) -> list[str]:
    """The names of runs and of sweeps."""
    roots = [word.partition("=")[2] for word in words if word.startswith("paths.root=")]
    root = user_path([PathsConfig().root, *roots][-1])
    runs = [file.parent.name for file in sorted(root.glob(f"{FOLDERS}/status.json"))]
    return [*runs, *(file.stem for file in sorted((root / "sweeps").glob("*.json")))]


def _overrides(prefix: str, config_dir: Path | None) -> Candidates:
    """Groups and keys, or the values after `key=`."""
    key, equals, value = prefix.partition("=")
    name = key.lstrip("+~")
    mark = key[: len(key) - len(name)]
    if not equals:
        return {mark + word: about for word, about in _names(name, mark).items()}
    if name in groups():
        values = {n: comment(file) for n, file in choice_files(name, config_dir).items()}
    else:
        values = dict.fromkeys(_values(name), "")
    before = f"{key}={_listed(value)}"
    return {before + word: about for word, about in values.items()}


def _names(prefix: str, mark: str) -> Candidates:
    """Groups, and the keys of the typed section: `training.` yields its keys, an empty word the sections."""
    parent = prefix[: prefix.rfind(".") + 1]
    owner = _section(parent)
    if owner is None:
        return {}
    described = {}
    for field in dataclasses.fields(owner):
        is_section = section_of(owner, field.name) is not None
        default = "" if is_section else f"default {_shown(field.default)}"
        described[f"{parent}{field.name}{'.' if is_section else '='}"] = default
    if parent:
        return described
    chosen = [group for group in groups() if (group == "experiment") == bool(mark)]
    return {
        **{f"{group}=": "" for group in chosen},
        **({} if mark else {"+experiment=": ""}),
        **described,
    }


def _section(parent: str) -> Any:
    owner: Any = Composition
    for part in filter(None, parent.split(".")):
        owner = owner and section_of(owner, part)
    return owner


def _values(key: str) -> list[str]:
    """The values of a key if they are few; the default of a number."""
    if key == "launcher.kind":
        from quantexp.config.launchers import kinds

        return sorted(kinds())
    parent, _, name = key.rpartition(".")
    owner = _section(parent)
    if owner is None or name not in get_type_hints(owner):
        return []
    hint = get_type_hints(owner)[name]
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return [member.name for member in kind]
        if kind is bool:
            return ["true", "false"]
    default = getattr(owner, name, None)
    if isinstance(default, Enum):
        return [member.name for member in type(default)]
    return [_shown(default)] if isinstance(default, int | float) else []


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    return "" if value is dataclasses.MISSING else str(value)


def candidate_lines(line: str) -> str:
    """The candidates for a shell: on each line the word, a tab and its description."""
    return "".join(
        f"{word}\t{about if len(about) <= _LONGEST_ABOUT else about[: _LONGEST_ABOUT - 3] + '...'}\n"
        for word, about in completions(line).items()
        if word.isprintable()  # the name of a run may be anything
    )
