"""The layout of shards in a capture folder, and their completion after the last write. Needs no torch.

    shards/rank0-00001.safetensors    [header, padded to 64 KiB][values of a tensor][values of the next] ...

At the end of a SLURM job, which has only seconds, this seals the shards of killed processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantexp.capture.store.manifest import MANIFEST, lines_of
from quantexp.folders import PART
from quantexp.model.safetensors import entry, framed
from quantexp.runs.status import write_json

#: The folder of the shards in the capture folder.
SHARDS = "shards"
INDEX = "capture.safetensors.index.json"
#: The offset of the values.
HEADER_BYTES = 1 << 16
#: The first entry of a header.
PREAMBLE: Mapping[str, Any] = {"__metadata__": {"format": "pt"}}


def finish_shards(folder: Path) -> None:
    """Seal the open shards of killed processes, and write the index; no process may be writing.

    An open shard is truncated to the values that the manifest names. A shard that contradicts the manifest stays
    unchanged.

    Raises:
        OSError: the folder cannot be written.
    """
    if not (folder / SHARDS).is_dir():
        return
    of_file: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines_of(folder / MANIFEST):
        if line.get("key") is not None:
            of_file.setdefault(str(line["file"]), {})[str(line["key"])] = line
    for part in sorted((folder / SHARDS).glob(f"rank*.safetensors{PART}")):
        path = part.with_name(part.name.removesuffix(PART))
        _seal_listed(part, path, of_file.get(str(path.relative_to(folder)), {}))
    weight_map = {key: file for file, lines in of_file.items() for key in lines}
    total = sum(int(line["bytes"]) for lines in of_file.values() for line in lines.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _seal_listed(part: Path, path: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    header, end = dict(PREAMBLE), HEADER_BYTES
    try:
        for key, line in lines.items():
            start, stop = line["offsets"]
            if start != end:
                return
            header[key] = entry(
                line["dtype"], line["shape"], start - HEADER_BYTES, stop - HEADER_BYTES
            )
            end = stop
        content = framed(header, HEADER_BYTES)
    except (KeyError, TypeError, ValueError):
        return
    if not lines or part.stat().st_size < end:
        return
    with part.open("r+b") as stream:
        stream.write(content)
        stream.truncate(end)
    part.rename(path)
