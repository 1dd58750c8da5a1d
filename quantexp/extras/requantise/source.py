"""The scheme of a capture's run."""

from __future__ import annotations

from pathlib import Path

from quantexp.analysis.tensors.run_record import read_names
from quantexp.capture.reader import Capture
from quantexp.errors import RunError
from quantexp.quant.label import is_unquantised
from quantexp.runs.paths import RunDir

#: Quantisation types without quantisation, or without information.
_UNQUANTISED = frozenset({"bf16", "none", "None"})


def trajectory_note(capture: Capture) -> list[str]:
    """A note that names the scheme of a quantised capture; None for a capture in the working precision.

    Values are those before quantisation all the same, but of a training that quantisation has led elsewhere. The scheme
    is the run's; where there is no run, the quantisation types that the tensors name.
    """
    types = sorted({str(e.metadata.get("quant_type")) for e in capture} - _UNQUANTISED)
    scheme = _scheme_of(capture.folder)
    if (scheme and is_unquantised(scheme)) or not (scheme or types):
        return []
    under = scheme or ", ".join(types)
    what = "values are those before quantisation, but of a training that was quantised"
    return [f"captured under {under}: {what}"]


def _scheme_of(folder: Path) -> str | None:
    """The scheme of the capture's run; None if the folder is not in a run."""
    try:
        return read_names(RunDir(folder.resolve().parent)).scheme
    except RunError:
        return None
