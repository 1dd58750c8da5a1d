"""A process that runs functions of test files with Transformer Engine's Python in place of the package.

A process serves all tests of its version, since the imports take most of the time. `fresh` gives a test its own, for
settings that Transformer Engine reads once at import.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.extras.transformer_engine.rank.wheels import unpacked_wheel

#: Hopper and Blackwell.
H100, B200 = (9, 0), (10, 0)


class Child:
    """A process with a version of Transformer Engine, started at the first use."""

    def __init__(self, version: str, environment: Mapping[str, str] | None = None) -> None:
        self.version = version
        self._environment = dict(environment or {})
        self._pool: ProcessPoolExecutor | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, capability: tuple[int, int] = B200
    ) -> Any:
        """Call a function of a module in the process; its error is raised here, with its traceback."""
        if self._pool is None:
            wheel = unpacked_wheel(self.version)
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            self._pool.submit(_start, wheel, self._environment).result(timeout=300)
        return self._pool.submit(_run, function, args, capability).result(timeout=300)

    def fresh(self, environment: Mapping[str, str]) -> Child:
        """A process of one's own with environment variables; the caller closes it."""
        return Child(self.version, environment)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start(wheel: Path, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from tests.extras.transformer_engine.rank.stub import install

    torch.set_num_threads(1)
    install(wheel)


def _run(function: Callable[..., Any], args: tuple[Any, ...], capability: tuple[int, int]) -> Any:
    from tests.extras.transformer_engine.rank.stub import machine

    with machine(capability):
        return function(*args)


def slots_of_module(module: Any) -> dict[Any, Any]:
    """In a child: what the quantizers of an initialised module make of each operand."""
    from quantexp.extras.transformer_engine.rank.linear import held_by_module
    from quantexp.quant.sites import Site, slots_of

    return {slot: held_by_module(module, slot) for slot in slots_of(Site.LINEAR)}
