"""Opens and filters the sources that the command line names.

A DIR is a capture folder (a run's `tensors/`, or any folder with a manifest or with files named as captured tensors), a
run, a folder of runs, or a sweep's list. A run that captured nothing is a source without tensors: its loss can be
drawn all the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from quantexp.analysis.chapter import Source
from quantexp.analysis.draw.arguments import NUMBERS, numbers, require_folders
from quantexp.analysis.tensors.run_record import RunNames, read_names
from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.capture.store.manifest import MANIFEST, ManifestLine
from quantexp.capture.store.values import metadata_in
from quantexp.errors import CaptureError, ConfigError, UnreadableError
from quantexp.folders import user_path
from quantexp.runs.find import FOLDERS, is_run, scope
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir

#: Maximum values that an error lists.
_MOST_LISTED = 20


def open_sources(
    folders: Sequence[str],
    filters: Mapping[str, str],
    say: Callable[[str], None] = lambda line: None,
) -> list[Source]:
    """Every source with filtered tensors, in the order given, without repeats; reports runs of a sweep without folders.

    Raises:
        CaptureError: a folder that is not there or holds nothing to draw; filters that leave nothing.
        ConfigError: a filter's value that no tensor has.
        RunError: a sweep's list, or a configuration, that cannot be read.
    """
    require_folders(folders)
    by_place: dict[Path, Source] = {}
    for folder_word in folders:
        for source in _opened(folder_word, say):
            place = (source.run.root if source.run else source.capture.folder).resolve()
            by_place.setdefault(place, source)
    sources = _with_distinct_labels(list(by_place.values()))
    if not filters:
        return sources
    return _filtered([completed(source, filters, say) for source in sources], filters)


def default_out(folders: Sequence[str], sources: Sequence[Source]) -> Path:
    """The default output folder: in the run or the given folder; for several, `figures` in the working directory."""
    if len(folders) > 1:
        return Path("figures")
    first = user_path(folders[0])
    if len(sources) == 1 and sources[0].run is not None:
        return sources[0].run.figures
    return first.with_suffix("") / "figures" if first.is_file() else first / "figures"


def _opened(word: str, say: Callable[[str], None]) -> list[Source]:
    path = user_path(word)
    if path.is_dir() and is_run(RunDir(path)):
        return [_of_run(RunDir(path))]
    if path.is_file() or _holds_runs(path):
        scoped = scope(word, path.parent if path.is_file() else path)
        if not scoped.runs:
            raise CaptureError(f"{word}: none of its runs has a folder yet")
        for missing in scoped.missing:
            say(f"{missing.name}: {missing.reason}")
        return [_of_run(run) for run in scoped.runs]
    return [_of_folder(path)]


def _holds_runs(path: Path) -> bool:
    return not (path / MANIFEST).is_file() and any(
        is_run(RunDir(folder)) for folder in path.glob(FOLDERS)
    )


def _of_run(run: RunDir) -> Source:
    names, damage = _read(run)
    folder = run.captured(names.capture_dir)
    try:
        capture = open_capture(folder, statistics=True)
    except CaptureError as error:
        capture = Capture(folder, [])
        if isinstance(error.__cause__, UnreadableError):
            damage.append(str(error))
    return Source(names.run, capture, names, run, (*damage, *capture.damage))


def _read(run: RunDir) -> tuple[RunNames, list[str]]:
    """The names of a run, and what is wrong with its configuration and metrics."""
    names = RunNames(run.root.resolve().name)
    try:
        names = read_names(run)
        read_metrics(run)
    except UnreadableError as error:
        return names, [str(error)]
    return names, []


def _of_folder(path: Path) -> Source:
    capture = open_capture(path, statistics=True)
    run = RunDir(capture.folder.resolve().parent)
    if is_run(run) and run.tensors.resolve() == capture.folder.resolve():
        names, damage = _read(run)
        return Source(names.run, capture, names, run, (*damage, *capture.damage))
    name = capture.folder.resolve().name
    return Source(name, capture, RunNames(name), damage=capture.damage)


def _with_distinct_labels(sources: list[Source]) -> list[Source]:
    """Unique labels: a shared label gets its parent folder as a prefix, and a number if that is not enough."""
    seen: Counter[str] = Counter(source.label for source in sources)
    labels = [
        source.label
        if seen[source.label] == 1
        else f"{(source.run.root if source.run else source.capture.folder).resolve().parent.name}-{source.label}"
        for source in sources
    ]
    again: Counter[str] = Counter()
    labelled = []
    for source, label in zip(sources, labels, strict=True):
        again[label] += 1
        labelled.append(
            replace(source, label=label if again[label] == 1 else f"{label}-{again[label]}")
        )
    return labelled


def _filtered(sources: list[Source], filters: Mapping[str, str]) -> list[Source]:
    rows = [entry.metadata for source in sources for entry in source.capture]
    for name, text in filters.items():
        _require_known(name, text, rows)
    kept = [
        replace(
            source,
            capture=Capture(
                source.capture.folder,
                [entry for entry in source.capture if fits(entry.metadata, filters)],
            ),
        )
        for source in sources
    ]
    if not any(len(source.capture) for source in kept):
        alone = ", ".join(
            f"{name}={text} {sum(fits(row, {name: text}) for row in rows)}"
            for name, text in filters.items()
        )
        raise CaptureError(
            f"no tensor fits all filters together; of {len(rows)} each alone leaves: {alone}"
        )
    return [source for source in kept if len(source.capture)]


def fits(metadata: Mapping[str, Any], filters: Mapping[str, str]) -> bool:
    """Whether a tensor passes all filters; missing metadata passes none."""
    return all(
        any(_matches(value, name, part) for value in values_of(metadata, name) for part in parts)
        for name, text in filters.items()
        for parts in [text.split(",")]
    )


def _matches(value: Any, name: str, part: str) -> bool:
    if name in NUMBERS:
        return any(value in numbers_ for numbers_ in numbers(name, part))
    return fnmatchcase(str(value), part.strip())


def _require_known(name: str, text: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a value that no tensor has."""
    present = {value for row in rows for value in values_of(row, name)}
    for part in text.split(","):
        if any(_matches(value, name, part) for value in present):
            continue
        listed = [str(value) for value in sorted(present, key=lambda v: (str(type(v)), v))]
        more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
        there = ", ".join(listed[:_MOST_LISTED]) + more
        choices = (
            f"there are: {there}"
            if listed
            else "neither a manifest, nor the files' names, nor the files say it: no tensor can be chosen by it"
        )
        raise ConfigError(f"no {_called(name)} {part.strip()!r}; {choices}")


def _called(name: str) -> str:
    if name in NUMBERS:
        return name
    return f"{'quantisation or layer type' if name == 'type' else name} called"


def foreign(sources: Sequence[Source]) -> list[tuple[str, str]]:
    """The .pt files in a source's folder that are not among its tensors, each with a reason."""
    strangers = []
    for folder in (source.capture.folder for source in sources):
        with contextlib.suppress(CaptureError):  # nothing captured
            strangers += foreign_files(str(folder), folder)
    return strangers


def foreign_files(folder_word: str, folder: Path) -> list[tuple[str, str]]:
    """The .pt files of a capture folder that are not its tensors, by its manifest or, without one, by their names.

    Another name of a tensor's file (a hard link) is no further file.
    """
    files = (each for entry in open_capture(folder_word) for each in entry.stored)
    listed = {str(entry.metadata["file"]) for entry in files if entry.metadata.get("file")}
    paths = {str(path.relative_to(folder)): path.lstat() for path in sorted(folder.rglob("*.pt"))}
    known = {(stat.st_dev, stat.st_ino) for file, stat in paths.items() if file in listed}
    why = "is none of the captured tensors: neither listed nor named as one"
    return [
        (file, f"{folder / file} {why}")
        for file, stat in paths.items()
        if (stat.st_dev, stat.st_ino) not in known
    ]


#: Filter -> key of the metadata, if its name differs.
_KEYS = {"type": ("quant_type", "layer_type")}


def values_of(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """The value of a filter's key in a tensor's metadata."""
    values = (metadata.get(key) for key in _KEYS.get(name, (name,)))
    return [value for value in values if value is not None]


def completed(source: Source, filters: Iterable[str], say: Callable[[str], None]) -> Source:
    """The source with the metadata for the filters completed from its files; reports values that stay unknown."""
    entries = list(source.capture)
    for name in filters:
        absent = [i for i, entry in enumerate(entries) if not values_of(entry.metadata, name)]
        for i in absent:
            entries[i] = _with(entries[i], name, say)
        unknown = sum(not values_of(entries[i].metadata, name) for i in absent)
        if unknown:
            say(
                f"{source.label}: {unknown} of {len(entries)} tensors do not say their {name}: they are left out"
            )
    return replace(source, capture=Capture(source.capture.folder, entries))


def _with(entry: CapturedTensor, name: str, say: Callable[[str], None]) -> CapturedTensor:
    """The tensor with the metadata of its file; reports a file that cannot be read."""
    if not entry.metadata.get("file") or entry.metadata.get("key") is not None:
        return entry
    try:
        value: object = metadata_in(entry.path).get(name)
    except (CaptureError, OSError) as error:
        say(str(error))
        return entry
    if name in NUMBERS:
        value = int(str(value)) if str(value).isdecimal() else None
    if not isinstance(value, int | str):
        return entry
    metadata = cast(ManifestLine, {**entry.metadata, name: value})
    return replace(entry, metadata=metadata)
