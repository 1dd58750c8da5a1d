"""Imports Megatron-Core without torch's compiler.

Megatron decorates some fused functions with `torch.compile`, which loads 800 modules of the compiler at once: half of
the time that importing Megatron takes. Here such a function is compiled when it is first called, and quantexp's models
call none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quantexp.training.megatron.without_te import hide_broken_te


@contextmanager
def compiling_on_first_call() -> Iterator[None]:
    """`torch.compile`, applied inside, compiles a function when it is first called."""
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def import_megatron() -> None:
    """Import Megatron, without a broken Transformer Engine; call it before any other module imports Megatron."""
    hide_broken_te()
    with compiling_on_first_call():
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
