"""Converts pages of wikitext in a child process, with a limit a page.

mwparserfromhell tries every opening mark as the start of a construct. If it has no end, the parser reads the rest of
the page in vain, so n such marks cost n pages; some constructs double the time for each level that they are nested, and
the equal signs of a heading may overflow the stack, which ends a process. The child converts one page after the other.
A page that takes it longer than `MAX_PAGE_S`, or ends it, is refused, and another child takes the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import quantexp
from quantexp.data.wiki_names import ENGLISH, Wiki
from quantexp.data.wikitext import has_markup, to_plain_text
from quantexp.errors import DataError

#: Seconds of processor time that a page may take; an ordinary one of 2 MB, the most that Wikipedia has, takes some ten.
MAX_PAGE_S = 60


def page_text(wikitext: str, wiki: Wiki = ENGLISH) -> str:
    """`to_plain_text` within the limit.

    Raises:
        ValueError: as `to_plain_text`, or the page exceeds the limit or ends the parser.
        RecursionError: as `to_plain_text`.
        DataError: something else ended the child.
    """
    if not has_markup(wikitext):
        return to_plain_text(wikitext, wiki)
    return _parser_of(os.getpid()).text_of(wikitext, wiki)


@cache
def _parser_of(pid: int) -> _Parser:
    """The parser of a process; a fork of it gets its own."""
    parser = _Parser()
    atexit.register(parser.end)
    return parser


class _Parser:
    """The child, started for the first page and after each that ended it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def text_of(self, wikitext: str, wiki: Wiki) -> str:
        """The text of a page; errors are those of `page_text`."""
        if self._child is not None and self._child.poll() is not None:
            self.end()  # something ended it between two pages
        child = self._child = self._child or _start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump((wikitext, wiki, MAX_PAGE_S), child.stdin)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise _refusal(self.end()) from None
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    def end(self) -> int:
        """End the child, if there is one, and return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        with contextlib.suppress(OSError):  # it does not read any more
            child.communicate()
        return child.wait()


def _start() -> subprocess.Popen[bytes]:
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(Path(quantexp.__file__).parents[1]), *inherited])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quantexp.data.page_parser"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )


def _refusal(code: int) -> Exception:
    if code == -signal.SIGXCPU:
        return ValueError(f"it takes mwparserfromhell more than {MAX_PAGE_S} s")
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return ValueError("it overflows mwparserfromhell's stack")
    return DataError(
        f"the process that converts wikitext ended with exit code {code}: run the same command again"
    )


def main() -> None:
    """Convert pages from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's end closes the input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            wikitext, wiki, limit_s = pickle.load(sys.stdin.buffer)
            _limit(limit_s)
            pickle.dump(_answer(wikitext, wiki), sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _limit(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def _answer(wikitext: str, wiki: Wiki) -> str | Exception:
    try:
        return to_plain_text(wikitext, wiki)
    except (ValueError, RecursionError) as error:
        return error


if __name__ == "__main__":
    main()
