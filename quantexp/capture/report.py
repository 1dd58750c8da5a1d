"""What a capture holds, counted: at the end of a run in `report.json` beside the manifest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from quantexp.capture.manifest import MANIFEST
from quantexp.capture.reader import Capture, open_capture
from quantexp.status import write_json

REPORT = "report.json"
#: What tensors are counted by; the layer type is the site, attention or linear.
KEYS = ("layer_type", "module", "layer", "operation", "quant_type")


def write_report(folder: Path) -> None:
    """Write the report of a capture folder, where it lists any tensor."""
    manifest = folder / MANIFEST
    if manifest.is_file() and manifest.stat().st_size:
        write_json(folder / REPORT, summary(open_capture(folder)))


def summary(capture: Capture) -> dict[str, Any]:
    """Counts and bytes, by site, module, layer, operation and quantisation type.

    `files` counts stored values: in a shard a tensor counts as a file of its own.
    """
    files = capture.with_values()
    shards = {entry.metadata["file"] for entry in files if entry.metadata.get("key") is not None}

    def by(key: str) -> dict[str, dict[str, int]]:
        count: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        for entry in files:
            value = str(entry.metadata.get(key))
            count[value] += 1
            num_bytes[value] += int(entry.metadata.get("bytes") or 0)
        return {value: {"files": count[value], "bytes": num_bytes[value]} for value in count}

    return {
        "folder": str(capture.folder),
        "listed": len(capture),
        "files": len(files),
        "shards": len(shards),
        "bytes": capture.num_bytes,
        "left_out": sum(1 for entry in capture if entry.metadata.get("left_out")),
        **{f"by_{key}": by(key) for key in KEYS},
    }
