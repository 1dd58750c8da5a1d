"""The log of a rank, through Python's `logging`.

quantexp's own lines go to standard error, with the time in UTC and the name of the process:

    2026-01-02 03:04:05 INFO rank 0: iteration 1 of 8, loss 10.3742

Warnings and log lines of Megatron, torch, Transformer Engine and MLflow's client go to a separate file: they
concern the libraries' options and help developers, not users. Errors that a library logs go to the file and to
standard error. Secrets appear in none of them (`quantexp.runs.redaction`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from quantexp.runs.redaction import RedactingFormatter

#: The logger of everything that a run prints.
LOG = logging.getLogger("quantexp")
LIBRARIES = ("megatron", "torch", "transformer_engine", "mlflow", "urllib3")


@contextlib.contextmanager
def log_to_stderr(process: str) -> Iterator[None]:
    """Write quantexp's log lines to standard error; `process` names this process in each."""
    handler = logging.StreamHandler()
    formatter = RedactingFormatter(
        f"%(asctime)s %(levelname)s {process}: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    level, propagates = LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False  # a library may have added a handler to the root logger
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = propagates


@contextlib.contextmanager
def redirect_library_messages(log: Path) -> Iterator[None]:
    """Append the libraries' messages to `log`, which is created with the first one.

    The handlers with which a library writes to standard error itself, as torch does from many of its loggers, are off,
    whenever it adds them.
    """
    handler = logging.FileHandler(log, delay=True, encoding="utf-8")
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    errors.setFormatter(RedactingFormatter("%(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = {each: (list(each.handlers), each.propagate) for each in loggers}
    original_record = logging.getLogRecordFactory()
    logged_warnings = logging.Logger("warnings")
    logged_warnings.addHandler(handler)
    original_show = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None and is_library_file(filename):
            text = warnings.formatwarning(message, category, filename, lineno, line)
            logged_warnings.warning(text.strip())
        else:
            original_show(message, category, filename, lineno, file, line)

    def record(name: str, *args: Any, **keywords: Any) -> logging.LogRecord:
        logger = logging.getLogger(name)
        while logger.name.partition(".")[0] in LIBRARIES and logger.parent is not None:
            own = [each for each in logger.handlers if each is errors or not _is_terminal(each)]
            if len(own) < len(logger.handlers):
                before.setdefault(logger, (list(logger.handlers), logger.propagate))
                logger.handlers = own
                logger.propagate = logger not in loggers
            logger = logger.parent
        return original_record(name, *args, **keywords)

    for logger in loggers:
        logger.handlers = [*logger.handlers, handler, errors]
        logger.propagate = False
    warnings.showwarning = show
    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(original_record)
        warnings.showwarning = original_show
        for logger, (handlers, propagates) in before.items():
            logger.handlers, logger.propagate = handlers, propagates
        handler.close()


def _is_terminal(handler: logging.Handler) -> bool:
    """Whether it writes to standard error; torch 2.15 has a handler of its own for that, no `StreamHandler`."""
    if isinstance(handler, logging.StreamHandler):
        return not isinstance(handler, logging.FileHandler) and bool(handler.stream)
    return type(handler).__module__.partition(".")[0] in LIBRARIES


def is_library_file(filename: str) -> bool:
    """Whether a warning's file belongs to an installed copy of one of the libraries."""
    parts = Path(filename).parts
    return "site-packages" in parts and any(name in parts for name in LIBRARIES)


def log_to(log: Path) -> None:
    """Append all further output of this process, a crash's included, to its own log."""
    with log.open("ab") as log_stream:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log_stream.fileno(), stream.fileno())
