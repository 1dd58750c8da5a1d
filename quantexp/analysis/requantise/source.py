"""What a capture says of itself beyond its tensors: files that are none of its own, and what trained it."""

from __future__ import annotations

from pathlib import Path

from quantexp.capture.reader import Capture, open_capture


def foreign_files(given: str, folder: Path) -> list[tuple[str, str]]:
    """The .pt files of a capture folder that are none of its tensors, by its manifest or, without one, their names."""
    listed = {str(entry.metadata["file"]) for entry in open_capture(given).with_values()}
    found = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*.pt")))
    why = "is none of the captured tensors: neither listed nor named as one"
    return [(file, f"{folder / file} {why}") for file in found if file not in listed]


def trajectory_note(capture: Capture) -> list[str]:
    """A line that names the schemes of a capture that was not made in the working precision; none if it was.

    Values are those before quantisation all the same, but of a training that quantisation has led elsewhere.
    """
    schemes = sorted(
        {str(e.metadata.get("quant_type")) for e in capture} - {"bf16", "none", "None"}
    )
    if not schemes:
        return []
    return [
        f"captured under {', '.join(schemes)}: values are those before quantisation, but of a training that was "
        "quantised"
    ]
