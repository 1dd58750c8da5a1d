"""The numerics of one captured iteration of a run, from lists that grow while the run goes on.

The lists are read once, for the iteration of each line; a line is parsed when its iteration is shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantexp.capture.lines import iteration_of, lists_of, unlisted
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, ManifestLine
from quantexp.errors import UnreadableError
from quantexp.extras.forensics.watch.tail import Tail
from quantexp.reading.files import open_file
from quantexp.reading.json_files import Line, value_of
from quantexp.runs.paths import RunDir

#: Seconds for values whose statistics were not captured.
LOOK_S = 2.0
#: Maps that are kept.
_KEPT = 24
#: Iteration -> first byte and end of stretches of its lines.
_Stretches = dict[int, list[list[int]]]


class _List:
    """Where the lines of each iteration are in one list."""

    def __init__(self, file: Path) -> None:
        self.tail, self.stretches = Tail(file), _Stretches()
        self.num_lines = 0

    def refresh(self) -> None:
        """Read the lines that were added.

        Raises:
            UnreadableError: the file cannot be read.
        """
        while True:
            piece = self.tail.read()
            if piece.is_anew:
                self.stretches, self.num_lines = {}, 0
            end = piece.start
            for text in piece.text.splitlines(keepends=True):
                start, end = end, end + len(text)
                if (iteration := iteration_of(text)) is not None:
                    self._add(iteration, start, end)
            if piece.is_last:
                return

    def _add(self, iteration: int, start: int, end: int) -> None:
        self.num_lines += 1
        stretches = self.stretches.setdefault(iteration, [])
        if stretches and stretches[-1][1] == start:
            stretches[-1][1] = end
        else:
            stretches.append([start, end])

    def lines(self, iteration: int, damage: list[str]) -> Iterator[dict[str, Any]]:
        """The lines of an iteration; adds what is wrong with lines to `damage`."""

        def report(error: UnreadableError) -> None:
            damage.append(str(error))

        file = self.tail.file
        try:
            with open_file(file) as stream:
                for start, end in self.stretches.get(iteration, ()):
                    stream.seek(start)
                    for text in stream.read(end - start).splitlines(keepends=True):
                        value = value_of(Line(start, start, text), file, ManifestLine, report)
                        if value is not None:
                            yield dict(value)
        except (FileNotFoundError, UnreadableError, OSError) as error:
            damage.append(str(error))


class FollowedCapture:
    """The captures of one run."""

    def __init__(self, run: RunDir, capture_dir: str | None) -> None:
        self._run, self._folder = run, run.captured(capture_dir)
        self._lists: dict[str, dict[Path, _List]] = {MANIFEST: {}, STATISTICS: {}}
        self._kept: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def refresh(self) -> dict[str, Any]:
        """The captured iterations, ascending, and the number of lines about them.

        Raises:
            UnreadableError: a list cannot be read.
        """
        for name, lists in self._lists.items():
            files = lists_of(self._folder, name)
            for file in [*lists]:
                if file not in files:
                    del lists[file]
            for file in files:
                lists.setdefault(file, _List(file)).refresh()
        every = [one for lists in self._lists.values() for one in lists.values()]
        iterations = sorted({iteration for one in every for iteration in one.stretches})
        return {"iterations": iterations, "lines": sum(one.num_lines for one in every)}

    def numerics(self, iteration: int) -> dict[str, Any]:
        """The map of an iteration as the report has it, and `lines` as of `refresh`.

        Raises:
            UnreadableError: a list cannot be read.
        """
        known = self.refresh()
        key = iteration, known["lines"]
        if key not in self._kept:
            self._kept[key] = {"numerics": self._numerics(iteration), "lines": known["lines"]}
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _numerics(self, iteration: int) -> dict[str, Any]:
        # imports torch, which a page of losses alone does without
        from quantexp.analysis.report.cells import MAX_CELLS, Lines, numerics_of
        from quantexp.analysis.report.judged import Deadline
        from quantexp.capture.captured import CapturedTensor
        from quantexp.capture.reader import together

        damage: list[str] = []
        values, statistics = (
            [line for one in self._lists[name].values() for line in one.lines(iteration, damage)]
            for name in (MANIFEST, STATISTICS)
        )
        every = [*values, *unlisted(statistics, values)]
        entries = together((CapturedTensor.of(self._folder, line) for line in every), damage)
        lines = Lines(entries, [iteration], [iteration], damage=damage)
        content = numerics_of(self._run, lines, MAX_CELLS, Deadline(LOOK_S))
        return asdict(content)
