"""Importing Megatron-Core where Transformer Engine is installed but cannot work.

Megatron-Core catches `ImportError` alone, and Transformer Engine without its CUDA libraries raises `RuntimeError` or
`OSError` on import, so that `import megatron.core` fails too. `hide_broken_te()` tries the import once; if it
fails in that way the name is marked as absent in `sys.modules`, which Megatron-Core understands. Where Transformer
Engine works, or is not installed, nothing changes. Call it before the first import of `megatron.core`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys


def hide_broken_te() -> str | None:
    """Mark a Transformer Engine that cannot be imported as absent.

    Returns:
        Why it cannot be imported, in one line, or None where it works or is not installed.
    """
    if sys.modules.get("transformer_engine", ...) is None:
        return "hidden earlier in this process"
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine")
    except ImportError:
        return None  # Megatron-Core handles this one itself.
    except (RuntimeError, OSError) as error:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None
