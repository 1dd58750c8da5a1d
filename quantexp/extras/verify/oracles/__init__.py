"""Other implementations of the formats, and where each follows the definitions.

Each module has `oracle()`, which raises ImportError if its package is missing. The extra `quantexp[verify]` installs
the packages; torch is always present. A missing or unusable oracle is listed with the reason, and is not counted.
"""

from __future__ import annotations

from importlib import import_module

from quantexp.extras.verify.oracles.oracle import Oracle

#: By package name, in the order of the table.
ORACLES = ("ml_dtypes", "gfloat", "en_dtypes", "torchao", "torch")

#: Exceptions that another version of a package may raise on a trial call.
_UNUSABLE = (OSError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError)


def find_oracles() -> tuple[list[Oracle], dict[str, str]]:
    """The usable oracles, and the reasons why the others are not, by name."""
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
