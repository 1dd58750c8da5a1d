"""The entry point: `quantexp [flags] [verb] [flags] group=choice key=value ...`.

The verb is the first word that is neither a flag nor a flag's value, if `verbs` knows it; else train. Without any word
the help is shown. Every verb has a module, here or in its extra, which is imported when the verb is typed. The modules
have the same names: `run(arguments)` returns the exit code, `record(...)` returns what `--json` prints, and `show(...)`
prints that for a person.

Exit codes: 0 done, 1 the user's error or a failed run (one line on standard error), 2 misuse of the command line, 130
interrupted. An unexpected exception gives one line with the file of its traceback, and 1. No module of this package
imports torch before its verb needs it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from importlib import import_module

from quantexp.cli.arguments import parser_of, split_verb, top_parser
from quantexp.cli.output import complain
from quantexp.cli.verbs import COMPLETE, verb_named
from quantexp.errors import QuantexpError
from quantexp.terminal.console import drop_rest


def main(argv: list[str] | None = None) -> int:
    """The console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [COMPLETE]:
        return _complete(words[1:])
    try:
        return _run(words)
    except QuantexpError as error:
        complain(error.message, error.listed)
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except Exception as error:  # noqa: BLE001  (a bug: its traceback goes into a file)
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            return 1
        from quantexp.cli.unexpected import refused_name, reported

        complain(refused_name(error) or reported(error))
        return 1


def _is_output_closed() -> bool:
    """Whether the reader of the output or of the messages has ended, such as head; the rest of both is dropped."""
    closed = []
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            drop_rest(stream)
            closed.append(stream)
    return bool(closed)


def _run(words: list[str]) -> int:
    verb, words = split_verb(words)
    if verb is None and set(words) <= {"-h", "--help"}:
        top_parser().parse_args(["--help"])
    from quantexp.cli.old_words import answer  # not needed for help

    if (message := answer(verb, words)) is not None:
        complain(message)
        return 2
    verb = verb or "train"
    arguments = parser_of(verb).parse_intermixed_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    code: int = import_module(verb_named(verb).module or f"quantexp.cli.{verb}").run(arguments)
    return code


def _interrupt(signum: int, frame: object) -> None:
    """Raise the exception of Ctrl-C for another signal, so that the worker ends too."""
    raise KeyboardInterrupt


def _complete(words: list[str]) -> int:
    from quantexp.cli.completion import candidate_lines

    with contextlib.suppress(
        Exception
    ):  # a shell would show the traceback in the line that is typed
        sys.stdout.write(candidate_lines(" ".join(words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
