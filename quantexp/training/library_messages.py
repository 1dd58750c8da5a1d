"""Warnings and log lines of Megatron, torch and Transformer Engine, in a file of their own.

They are about the libraries' options and tell a user nothing about the run, but a developer may want them. What
quantexp prints is left where it is; an error that a library logs is in the file and on standard error too.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

LIBRARIES = ("megatron", "torch", "transformer_engine")


@contextlib.contextmanager
def library_messages_in(log: Path) -> Iterator[None]:
    """Append to `log` what these libraries warn of; it is not made where they are silent."""
    handler = logging.FileHandler(log, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    errors.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    propagated = [logger.propagate for logger in loggers]
    own = logging.Logger("warnings")
    own.addHandler(handler)
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None and is_of_library(filename):
            own.warning(warnings.formatwarning(message, category, filename, lineno, line).strip())
        else:
            shown(message, category, filename, lineno, file, line)

    for logger in loggers:
        logger.addHandler(handler)
        logger.addHandler(errors)
        logger.propagate = False
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
        for logger, propagates in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.removeHandler(errors)
            logger.propagate = propagates
        handler.close()


def is_of_library(filename: str) -> bool:
    """Whether a warning's file belongs to one of the libraries as installed."""
    parts = Path(filename).parts
    return "site-packages" in parts and any(name in parts for name in LIBRARIES)
