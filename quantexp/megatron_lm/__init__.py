"""What `pretrain_gpt.py --spec quantexp.megatron_lm SPEC ...` imports; the extra of this name builds it.

`SPEC` is built when Megatron-LM's model builder asks for it, after its arguments are parsed. Importing this package
imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`SPEC`, stored where Megatron-LM looks for it: `__import__` asks the package for each name of its from-list."""
    if name != "SPEC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantexp.extra import Service, required

    globals()["SPEC"] = spec = required(Service.LAYER_SPEC, f"--spec {__name__}")()
    return spec
