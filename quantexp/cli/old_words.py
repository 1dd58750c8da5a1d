"""Answers a command line in the words of the old scripts with the command that does the same now. Needs no torch.

Options with a value (`--model X`, `--quant-type=X`, `quantization=X`), modes (`--mode batch`), flags (`--dry-run`),
first words (`collect`) and files (`python run_tensor_collection.py`) mean overrides, flags or a verb; together they are
one command. Our own words stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from quantexp.cli.arguments import flags_with_value, parser_of
from quantexp.cli.flags import KINDS
from quantexp.config.choices import choice_files, groups
from quantexp.folders import shell_line
from quantexp.schema.keys import OLD_KEYS, keys
from quantexp.terminal.close_matches import did_you_mean, near, one_of


@dataclass(frozen=True)
class _Meaning:
    """What a word without a value stands for."""

    verb: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


_BATCH = _Meaning(overrides={"quant": "glob(*)"}, flags=("-m",))
_QUICK = _Meaning(overrides={"training": "fast"})
_COLLECT = _Meaning(overrides={"capture": "tensors"})
_BOTH = _Meaning(overrides={"training": "fast", "analysis.auto": "true"})
#: First words, flags without a value and values of `--mode`, with `_` for `-`.
_MEANINGS = {
    **dict.fromkeys(("single", "run_single"), _Meaning()),
    **dict.fromkeys(("batch", "run_batch"), _BATCH),
    **dict.fromkeys(("quick", "run_quick"), _QUICK),
    **dict.fromkeys(("collect", "run_tensor_collection"), _COLLECT),
    **dict.fromkeys(("visualize", "visualise", "run_tensor_draw"), _Meaning("draw")),
    "quick_visualize": _Meaning("draw", flags=("--only", "quick_analysis")),
    **dict.fromkeys(("both", "one_click"), _BOTH),
    **dict.fromkeys(("dry_run", "dryrun", "check"), _Meaning("plan")),
    "list": _Meaning("list"),
    **{f"list_{kind}": _Meaning("list", flags=(kind,)) for kind in KINDS},
    "restore": _Meaning(overrides={"quant": "bf16"}),
    "train_config": _Meaning("list", flags=("presets",)),
    **dict.fromkeys(("flash_attention_config", "quant_type_modifier"), _Meaning()),
}
#: What ran an old script.
_INTERPRETER = re.compile(r"(\S*/)?(python[\d.]*|bash|sh)")
#: The verbs whose words are overrides; those of drawing are folders, and only its flags are translated.
_VERBS = ("train", "plan", "evaluate", "prepare")
#: The groups whose choices may be bare words.
_GROUPS = ("model", "dataset", "quant", "training")
_OF_SITE = re.compile(r"(?:(linear|qk|pv)_)?(\w+)")


@dataclass
class _Command:
    """The command that the words read so far stand for."""

    verb: str
    flags: list[str] = field(default_factory=list)
    #: Key -> value, without those of sites.
    overrides: dict[str, str] = field(default_factory=dict)
    #: linear, qk or pv -> the format of a site that has an option of its own.
    sites: dict[str, str] = field(default_factory=dict)
    #: Our own words.
    rest: list[str] = field(default_factory=list)
    #: The translated words, as they were typed, without values.
    old: list[str] = field(default_factory=list)
    #: A value of `--mode` that the old scripts did not have.
    unknown_mode: str | None = None

    def add(self, word: str, meaning: _Meaning) -> None:
        """Add a word without a value."""
        self.old.append(word)
        self.verb = meaning.verb or self.verb
        self.flags += meaning.flags
        self.overrides = {**meaning.overrides, **self.overrides}

    def set(self, word: str, key: str, value: str) -> None:
        """Add a value under our key."""
        self.old.append(word)
        if key == "quant":
            self.overrides |= _of_quant_type(value)
        elif key.startswith("quant/") and (match := _OF_SITE.fullmatch(value)):
            self.sites[match[1] or key.removeprefix("quant/")] = match[2]
        elif key == "capture":
            self.overrides[key] = (
                "off" if value.lower() in ("0", "false", "no", "off") else "tensors"
            )
        else:
            if key.startswith("capture."):
                self.overrides.setdefault("capture", "tensors")
            self.overrides[key] = value

    def words(self) -> list[str]:
        """The words after `quantexp`."""
        verb = [] if self.verb == "train" else [self.verb]
        if self.verb == "list":
            return [*verb, *(word for word in (*self.flags, *self.rest) if word in KINDS)]
        if self.verb == "draw":
            folder = self.overrides.get("capture.dir", "RUN")
            out = self.overrides.get("paths.root")
            return [*verb, *(self.rest or [folder]), *self.flags, *([f"out={out}"] if out else [])]
        overrides = self._scheme() | self.overrides
        return [*verb, *self.flags, *(f"{k}={v}" for k, v in overrides.items()), *self.rest]

    def _scheme(self) -> dict[str, str]:
        """The overrides of the sites: one of the ten schemes, or a scheme and what differs from it."""
        from quantexp.quant.scheme import (
            SCHEMES,
        )  # takes a second, for which a help should not wait

        linear, qk = (self.sites.get(site, "none") for site in ("linear", "qk"))
        named = {pair: name for name, pair in SCHEMES.items()}.get((linear, qk))
        sites = self.sites
        if "quant" not in self.overrides and named is not None:
            sites = {site: choice for site, choice in sites.items() if site == "pv"}
        base = {"quant": self.overrides.get("quant", named or "bf16")} if self.sites else {}
        return base | {f"quant/{site}": choice for site, choice in sites.items()}


def answer(verb: str | None, words: Sequence[str]) -> str | None:
    """The message about old words, which ends with the command; None where there are none."""
    if verb not in (None, "draw", *_VERBS) or not {"-h", "--help"}.isdisjoint(words):
        return None
    command = _Command(verb or "train")
    _read(command, _without_interpreter(list(words)), bare=verb != "draw")
    if command.unknown_mode is not None:
        hint = did_you_mean(near(command.unknown_mode, _MEANINGS, 1)) or "see quantexp help"
        return (
            f"--mode is a word of the old scripts, which had no mode {command.unknown_mode}; {hint}"
        )
    if not command.old:
        return None
    old = one_of(dict.fromkeys(command.old), "and")
    be = "is a word" if len(set(command.old)) == 1 else "are words"
    return f"{old} {be} of the old scripts; now it is: quantexp {shell_line(command.words())}"


def _without_interpreter(words: list[str]) -> list[str]:
    """The words from a script on, where the program that runs it stands before: `python -m run_single`."""
    if not words or not _INTERPRETER.fullmatch(words[0]):
        return words
    first = next((i for i in range(1, len(words)) if not words[i].startswith("-")), 0)
    script = words[first]
    return words[first:] if _is_script(script) or _script(script) in _MEANINGS else words


def _script(word: str) -> str:
    """The key of `_MEANINGS` that a word without a value may be, with or without folder and ending of a file."""
    name = PurePosixPath(word).stem if _is_script(word) else word
    return name.replace("-", "_").lower()


def _is_script(word: str) -> bool:
    return word.endswith((".py", ".sh"))


def _read(command: _Command, words: list[str], *, bare: bool) -> None:
    own = parser_of(command.verb)._option_string_actions
    names: list[str] = []
    while words:
        word = words.pop(0)
        head, equals, value = word.partition("=")
        name = head.lstrip("-+").replace("-", "_").lower()
        if head in own:
            takes = head in flags_with_value() and not equals
            command.flags += [word, *(words[:1] if takes else [])]
            words = words[takes:]
        elif word.startswith("--") or (name == "mode" and equals):
            if not _read_option(command, head, name, [value] if equals else words):
                command.rest.append(word)
        elif equals and (key := _key_of(name if name in OLD_KEYS else head.lstrip("+"), OLD_KEYS)):
            command.set(head, key, value)
        elif bare and not equals and _script(word) in _MEANINGS:
            command.add(word, _MEANINGS[_script(word)])
        elif bare and not equals:
            names += [] if _is_script(word) else [word]
        elif head == "quant":
            command.overrides[head] = value
        else:
            command.rest.append(word)
    for name in names:
        group = next((g for g in _GROUPS if name in choice_files(g, None)), None)
        command.rest.append(name if group is None else f"{group}={name}")


def _read_option(command: _Command, head: str, name: str, values: list[str]) -> bool:
    """Add an option; returns whether it is one. Its value is the first of `values`, which then loses it.

    A missing value of a group is its name in capitals, for the reader to replace.
    """
    is_given = bool(values) and not values[0].startswith("-")
    mode = values[0].replace("-", "_") if is_given else ""
    if name in _MEANINGS:
        command.add(head, _MEANINGS[name])
    elif name == "mode" and mode in _MEANINGS:
        command.add(f"{head} {values.pop(0)}", _MEANINGS[mode])
    elif name == "mode" and is_given:
        command.unknown_mode = values.pop(0)
    elif is_given and (key := _key_of(name, _options())):
        command.set(head, key, values.pop(0))
    elif (key := OLD_KEYS.get(name, name)) in _GROUPS:
        command.set(head, key, key.upper())
    else:
        return False
    return True


def _key_of(name: str, known: Mapping[str, str]) -> str | None:
    """Our key of an old one; of `quantization/linear` and `quantization.rules` the group's name is replaced.

    `quantization.type` and its like are the group itself, and so is the plural of its name.
    """
    name = name if name in known else re.sub(r"^(\w+?)[._](type|format|name)$", r"\1", name)
    group = re.match(r"\w+", name)
    if group and known.get(group[0]) == "quant" and (rest := name[group.end() :]):
        return f"quant{rest}"
    return known.get(name) or known.get(name.removesuffix("s"))


def _options() -> dict[str, str]:
    """Flags with a value -> our keys: those of the old scripts, groups, keys, and Megatron's names of keys."""
    ours = [*keys(), *groups()]
    of_megatron = {
        key.partition(".")[2]: key
        for section in ("dataset.", "model.", "training.")
        for key in ours
        if key.startswith(section)
    }
    return {**of_megatron, **dict(zip(ours, ours, strict=True)), **OLD_KEYS}


def _of_quant_type(value: str) -> dict[str, str]:
    """The overrides for a quantisation, or several; one that nobody knows stays as it is."""
    from quantexp.config.environment import QUANT_TYPES
    from quantexp.quant.scheme import SCHEMES

    schemes = {name.lower(): name for name in SCHEMES}
    each = [
        QUANT_TYPES.get(one.lower(), {"quant": schemes.get(one.lower(), one)})
        for one in value.split(",")
    ]
    precision = {k: v for meaning in each for k, v in meaning.items() if k != "quant"}
    return {"quant": ",".join(meaning["quant"] for meaning in each)} | precision
