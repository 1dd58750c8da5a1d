"""Imports Megatron-Core without a working Transformer Engine, and without torch's compiler.

Transformer Engine without its CUDA libraries raises `RuntimeError` or `OSError` on import. Megatron-Core catches only
`ImportError`, so `import megatron.core` fails, too. `hide_broken_te()` tries the import once; if it fails in that way,
it marks the package as absent in `sys.modules`, which Megatron-Core handles. If Transformer Engine works or is not
installed, nothing changes. Call it before the first import of `megatron.core`.

Without Transformer Engine, Megatron-Core's latent attention and mixture of experts fail on names that only it defines.
`complete_megatron()` sets them to the values that select Megatron's own implementation, if Megatron lacks them.

Megatron decorates some fused functions with `torch.compile`, which loads 800 modules of the compiler at once: half of
the time that importing Megatron takes. `import_megatron()` has such a function compiled when it is first called, and
quantexp's models call none. It also hides the client of W&B, which Megatron's inference would import: a fifth of the
rest. quantexp's tracker imports it where it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from quantexp.errors import RunError
from quantexp.schema.quant import TE_INSTALL


def complete_megatron() -> None:
    """Let latent attention and experts be built and run without Transformer Engine."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = (
            False  # otherwise Megatron calls isinstance with TELinear, not a type
        )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router tests whether it is None


def hide_broken_te() -> str | None:
    """Mark a Transformer Engine that cannot be imported as absent.

    Returns:
        The import error in one line, or None if Transformer Engine works or is not installed.
    """
    if sys.modules.get("transformer_engine", ...) is None:
        return "hidden earlier in this process"
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine")
    except ImportError:
        return None  # Megatron-Core handles this error.
    except (RuntimeError, OSError) as error:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def require_te(option: str) -> None:
    """Refuse an option that needs Transformer Engine where it is not installed, or broken.

    Raises:
        RunError: names the option and the reason.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        reason = "is not installed"
    elif (broken := hide_broken_te()) is not None:
        reason = f"cannot be imported here ({broken})"
    else:
        return
    raise RunError(f"{option} needs Transformer Engine, which {reason}: {TE_INSTALL}")


def megatron_version() -> str:
    """Import Megatron-Core's model and return the version, see `release`.

    Raises:
        ImportError, RuntimeError, OSError: Megatron-Core cannot be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.models.gpt.gpt_model
    return release(megatron.core)


def release(core: ModuleType) -> str:
    """The release of megatron.core.

    0.19 adds the commit of any git repository that its folder lies in, as that of a project with an environment inside.
    """
    return str(core.__version__).partition("+")[0]


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


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """A package that was not imported before cannot be imported inside."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


#: The warnings of an import before a rank began; the rank shows them when it imports, so that they are in its log.
EARLY: list[warnings.WarningMessage] = []


def import_megatron() -> None:
    """Import Megatron, without a broken Transformer Engine; call it before any other module imports Megatron."""
    while EARLY:
        early = EARLY.pop(0)
        warnings.showwarning(early.message, early.category, early.filename, early.lineno)
    hide_broken_te()
    with compiling_on_first_call(), hidden("wandb"):
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
