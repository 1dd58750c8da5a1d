"""Other implementations of the formats, and where each follows the definitions.

Each module has `oracle()`, which raises ImportError where its package is missing. Packages come with the extra
`quantexp[verify]`; torch is always there. One that is missing or cannot be used is named with the reason, and counts
for nothing.
"""

from __future__ import annotations

from importlib import import_module

from quantexp.formats.verify.oracles.oracle import Oracle

#: by the name of the package, in the order of the table.
ORACLES = ("ml_dtypes", "gfloat", "en_dtypes", "torchao", "torch")

#: What another version of a package may answer a small question with.
_UNUSABLE = (OSError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError)


def find_oracles() -> tuple[list[Oracle], dict[str, str]]:
    """Those that can be asked, and why the others cannot, by name."""
    present, absent = [], {}
    for name in ORACLES:
        try:
            present.append(import_module(f"{__name__}.{name}_oracle").oracle())
        except ImportError as error:
            missing = error.name or name
            absent[name] = f"{missing} cannot be imported ({error}): pip install 'quantexp[verify]'"
        except _UNUSABLE as error:
            absent[name] = f"this version cannot be used: {type(error).__name__}: {error}"
    return present, absent
