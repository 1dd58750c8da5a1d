"""`quantexp help [VERB]`: the help of a verb, or of the command."""

from __future__ import annotations

import argparse

from quantexp.cli.arguments import parser_of, top_parser
from quantexp.cli.verbs import all_verbs, is_verb
from quantexp.terminal.close_matches import did_you_mean, near


def run(arguments: argparse.Namespace) -> int:
    """Print the help of each named verb; returns 0."""
    for word in arguments.words:
        if not is_verb(word):
            close = did_you_mean(near(word, all_verbs()))
            parser_of("help").error(f"{word!r} is no verb{close and f'; {close}'}")
        parser_of(word).print_help()
    if not arguments.words:
        top_parser().print_help()
    return 0
