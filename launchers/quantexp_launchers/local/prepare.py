"""Prepares every run folder of a sweep before the first run starts, so that the whole sweep is visible."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from quantexp.config.load import plain
from quantexp.errors import ConfigError, QuantexpError, RunInUseError
from quantexp.launch.attempt import Opened, open_run, run_folder
from quantexp.launch.label import labels
from quantexp.launch.outcome import outcome
from quantexp.launch.recorded import root_of, with_absolute_paths
from quantexp.runs.device import device_class
from quantexp.runs.provenance import checkout, command_line
from quantexp.schema import Experiment
from quantexp_launchers.local.sheet import Item, Place, Sheet


def prepare_sheet(points: Sequence[tuple[Experiment, int]], console: Console) -> Sheet:
    """Prepare the runs of these experiments, each with its stage, and return their sheet.

    Every folder that is not in use becomes pending. Completed runs, runs in a scheduler, and runs that cannot be
    prepared are done.

    Raises:
        ConfigError: the runs have different `paths.root`.
    """
    experiments = [experiment for experiment, _ in points]
    roots = {root_of(experiment) for experiment in experiments}
    if len(roots) > 1:
        raise ConfigError(
            f"paths.root is one for the whole sweep, got {', '.join(sorted(map(str, roots)))}; give it once"
        )
    items = [
        Item(experiment, stage, label, plain(with_absolute_paths(experiment)))
        for (experiment, stage), label in zip(points, labels(experiments), strict=True)
    ]
    sheet = Sheet(roots.pop(), items, command_line(), checkout())
    with console.status(f"preparing {len(items)} runs"):
        for item in items:
            _prepare(item, sheet, console)
    return sheet


def _prepare(item: Item, sheet: Sheet, console: Console) -> None:
    device = device_class(item.experiment.launcher)
    try:
        with open_run(
            item.experiment, device, sheet.command, source=sheet.source, since=sheet.started
        ) as (folder, _):
            item.run = folder.run
            if folder.notice is not None:
                console.print(f"{escape(item.label)}: {escape(folder.notice)}", soft_wrap=True)
            mark_if_done(item, folder)
    except RunInUseError as error:
        item.run, item.place = run_folder(item.experiment, device), Place.IN_USE
        item.reason = str(error)
    except QuantexpError as error:
        item.place, item.reason = Place.DONE, str(error)
    except Exception as error:  # noqa: BLE001  (a bug in one point must not stop the others)
        traceback.print_exc()
        item.place, item.reason = Place.DONE, f"{type(error).__name__}: {error}"


def mark_if_done(item: Item, folder: Opened) -> None:
    """Mark a run as done if it is completed or in a scheduler."""
    if not folder.ready:
        item.outcome = outcome(item.experiment, folder.run, folder.skipped, folder.elsewhere)
        item.place = Place.DONE
