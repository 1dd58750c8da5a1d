"""Quantised training in an unmodified Megatron-LM: `pretrain_gpt.py --spec quantexp.megatron_lm SPEC ...`.

`SPEC` is built when Megatron-LM's model builder asks for it, after its arguments are parsed and its process groups
exist. Importing this package imports neither torch nor Megatron. docs/megatron_lm.md is its manual.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`SPEC`, stored where Megatron-LM looks for it: `__import__` asks the package for each name of its from-list."""
    if name != "SPEC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantexp.megatron_lm.spec import build_spec

    globals()["SPEC"] = spec = build_spec()
    return spec
