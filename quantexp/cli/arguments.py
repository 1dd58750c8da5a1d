"""Parses the command line into a verb and its arguments, and writes the messages about invalid words. No torch.

The verb is the first word that is neither a flag nor a flag's value. Misuse is one line on standard error and exit
code 2.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from quantexp import __version__
from quantexp.cli.flags import FLAGS
from quantexp.cli.output import complain
from quantexp.cli.verbs import all_verbs, is_verb, verb_groups, verb_named
from quantexp.folders import user_path
from quantexp.terminal.close_matches import did_you_mean, near

#: argparse's messages about an argument -> ours; `{flag}` is its longest name.
_MESSAGES = (
    (r"argument (?P<flag>.+): expected one argument", "{flag} needs a value: {flag} {metavar}"),
    (
        r"argument (?P<flag>.+): invalid int value: (?P<got>.+)",
        "{flag} must be a whole number, got {got}",
    ),
    (
        r"argument (?P<flag>.+): invalid float value: (?P<got>.+)",
        "{flag} must be a number, got {got}",
    ),
    (
        r"argument (?P<flag>.+): invalid choice: (?P<got>.+) \(choose from (?P<allowed>.+)\)",
        "{flag} must be one of {allowed}, got {got}",
    ),
    (
        r"argument (?P<flag>.+): ignored explicit argument (?P<got>.+)",
        "{flag} takes no value, got {got}",
    ),
    (
        r"the following arguments are required: (?P<flag>.+)",
        "{verb} needs {flag}: quantexp {verb} {usage}",
    ),
)


class Parser(argparse.ArgumentParser):
    """The parser of one verb, or of a command line without a verb."""

    def __init__(self, verb: str | None, **kwargs: object) -> None:
        super().__init__(
            prog="quantexp",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **kwargs,  # type: ignore[arg-type]
        )
        self.verb = verb
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.add_argument("-h", "--help", action="help", help="show this help")

    def error(self, message: str) -> NoReturn:
        """Write one line about the mistake in the command line, and exit with 2."""
        words = self._in_our_words(message)
        about = "" if self.verb in (None, "train") else f" {self.verb}"
        end = "" if words.endswith("?") else ";"
        complain(f"{words}{end} see quantexp help{about}")
        sys.exit(2)

    def _in_our_words(self, message: str) -> str:
        if message.startswith("unrecognized arguments: "):
            return self._unknown(message.removeprefix("unrecognized arguments: ").split(" "))
        for theirs, ours in _MESSAGES:
            if match := re.fullmatch(theirs, message):
                fields = {"got": "", "allowed": "", **match.groupdict()}
                flag = fields["flag"].partition(", ")[0].rpartition("/")[2]
                return ours.format(
                    flag=flag,
                    metavar=self._metavar(flag),
                    verb=self.verb,
                    usage=verb_named(str(self.verb)).usage,
                    got=fields["got"],
                    allowed=fields["allowed"].replace("'", ""),
                )
        return message

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((word for word in words if word.startswith("-")), None)
        if flag is None:
            return f"{self.verb} takes no overrides, got {' '.join(words)}"
        name = flag.partition("=")[0]
        others = [verb for verb in all_verbs() if name in parser_of(verb)._option_string_actions]
        if others:
            return f"{self.verb} has no flag {name}; it is one of {', '.join(others)}"
        close = did_you_mean(near(name, self._option_string_actions, 1))
        return f"unknown flag {name}{close and f'; {close}'}"

    def _metavar(self, flag: str) -> str:
        action = self._option_string_actions.get(flag)
        return str(action.metavar or "VALUE") if action else ""


def split_verb(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The verb and the other words; None if there is no verb."""
    is_value = False
    for i, word in enumerate(words):
        if is_value or word.startswith("-"):
            is_value = not is_value and word in flags_with_value()
        elif is_verb(word):
            return word, [*words[:i], *words[i + 1 :]]
        else:
            break
    return None, [*words]


@cache
def flags_with_value() -> frozenset[str]:
    """The flags of any verb that take a value."""
    actions = (action for verb in all_verbs() for action in parser_of(verb)._actions)
    return frozenset(flag for a in actions if a.nargs != 0 for flag in a.option_strings)


@cache
def parser_of(verb: str) -> Parser:
    """The parser of the words after a verb."""
    described = verb_named(verb)
    parser = Parser(
        verb,
        usage=_wrapped(f"quantexp {'[train]' if verb == 'train' else verb}", described.usage),
        description="\n\n".join(filter(None, (_sentence(described.about), described.more))),
        epilog=_examples(described.examples),
    )
    (described.add_arguments or FLAGS[verb])(parser)
    parser.set_defaults(verb=verb)
    parser.add_argument("--version", action="version", version=_VERSION, help=argparse.SUPPRESS)
    return parser


def top_parser() -> Parser:
    """The parser of a command line without a verb: its help lists the verbs."""
    described = all_verbs()
    width = max(map(len, described))
    listed = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {verb:{width}}  {described[verb].about}" for verb in verbs)])
        for title, verbs in verb_groups().items()
    )
    parser = Parser(
        None,
        usage="quantexp [VERB] [flags] group=choice key=value ...",
        description=f"Quantised training experiments that prove what ran.\n\n{listed}",
        epilog=_examples(
            (*described["train"].examples[:3], "plan quant=FA_linear_mxfp4", "list schemes")
        )
        + "\n\nquantexp help VERB shows the arguments, flags and examples of a verb.",
    )
    parser.add_argument("--version", action="version", version=_VERSION)
    return parser


_VERSION = f"quantexp {__version__}"


def _wrapped(command: str, usage: str) -> str:
    """A usage line that fits the terminal; text in brackets stays together."""
    whole = re.sub(r"\[[^\]]*\]+", lambda group: group[0].replace(" ", "\0"), usage)
    width = max(40, shutil.get_terminal_size().columns - len("usage: "))
    indent = " " * (len("usage: ") + len(command) + 1)
    lines = textwrap.wrap(
        whole, width - len(command) - 1, break_long_words=False, break_on_hyphens=False
    )
    return f"{command} {f'{chr(10)}{indent}'.join(lines)}".replace("\0", " ")


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"quantexp {example}" for example in examples)])


def neither_verb_nor_override(word: str) -> str:
    """The message about a word that is neither."""
    from quantexp.config.choices import choice_files, groups  # not needed for help

    if is_verb(word):
        return f"{word} is a verb: a command has one, before the overrides: quantexp {word} ..."
    chosen = [f"{group}={word}" for group in groups() if word in choice_files(group, None)]
    close = did_you_mean(chosen[:3] or near(word, all_verbs()))
    return f"{word!r} is neither a verb nor key=value{close and f'; {close}'}"


def require_overrides(words: Sequence[str]) -> None:
    """Exit with 2 if a word is neither a verb nor an override."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            parser_of("train").error(neither_verb_nor_override(word))


def root_and_rest(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder of runs, from `paths.root=` or the default, and the other words."""
    from quantexp.schema import PathsConfig

    roots = [word for word in words if word.startswith("paths.root=")]
    root = Path(roots[-1].split("=", 1)[1] if roots else PathsConfig().root)
    return user_path(root).absolute(), [word for word in words if word not in roots]


def ledger_scope(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """The folder of runs, and the one DIR that a verb about runs takes; exits with 2 if there are more words."""
    verb, words = arguments.verb, arguments.words
    root, rest = root_and_rest(words)
    if len(rest) > 1 or any("=" in word and not Path(word).exists() for word in rest):
        parser_of(verb).error(f"{verb} takes {verb_named(verb).usage}, got {' '.join(words)}")
    return root, rest[0] if rest else None


def name_folder(arguments: argparse.Namespace) -> None:
    """Resolve the DIR of a verb that takes one folder: it may be a part of a run's name below `paths.root=`."""
    from quantexp.runs.find import existing_or_named

    root, arguments.words = root_and_rest(arguments.words)
    arguments.folder = existing_or_named(arguments.folder, root)
