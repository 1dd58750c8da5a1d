"""Runs a preparation, or resumes it: every shard gets its output, then they are joined.

One process does it all, or several tasks make the outputs of some inputs each (`make_part`) and a last one, which finds
them, joins them (`prepare`). Either way the result has the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from quantexp.data.binary import pair_paths
from quantexp.data.prepare.finish import finish, publish
from quantexp.data.prepare.job import Job
from quantexp.data.prepare.make import make_outputs
from quantexp.data.prepare.outputs import Outputs, read_arrays, write_rejected, writing
from quantexp.data.prepare.partial import PartialFolder, partial_folder
from quantexp.data.prepared import Card, card_path, read_card
from quantexp.errors import DataError


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation."""

    prefix: Path
    card: Card
    #: Whether it existed already.
    existed: bool = False


def prepare(
    job: Job, console: Console, *, force: bool = False, patience_s: float = 0.0
) -> Prepared:
    """Runs the job, or resumes it after an interruption.

    A card identifies an earlier identical preparation. Another dataset at that prefix is replaced only with `force`,
    and is kept until the new one is complete. `patience_s` is how long to wait for other processes to leave the folder.

    Raises:
        DataError: more bad records than allowed, a file that is truncated or cannot be read, a full disk, no document
            to keep, another dataset at the prefix, or another process preparing it.
    """
    folder = partial_folder(job)
    if (existing := existing_result(job, force=force)) is not None:
        return existing
    with folder.alone(patience_s):
        if not folder.is_complete():
            with writing(folder.root):
                folder.begin()
            outputs = make_outputs(job, folder, console)
            _refuse_too_many(job, folder, outputs)
            finish(job, folder, outputs)
        publish(folder, job.prefix)
    done = read_card(job.prefix)
    assert done is not None
    return Prepared(job.prefix, done)


def make_part(job: Job, among: Sequence[int], console: Console, patience_s: float = 0.0) -> None:
    """Makes the outputs of some inputs, beside other processes that make those of others.

    It leaves the rest of them out once they alone have more unreadable records than allowed: `prepare`, which reads the
    outputs in the order of the input, refuses that record or an earlier one.

    Raises:
        DataError: an input cannot be read, an output cannot be written, or a process prepares there alone.
    """
    folder = partial_folder(job)
    card = read_card(job.prefix)
    if card is not None and card.job == job.hash:
        console.print(f"{job.prefix} is prepared already", soft_wrap=True, markup=False)
        return
    with folder.shared(patience_s):
        if folder.is_complete():
            return
        tally = make_outputs(job, folder, console, among).tally
    counts = f"{tally.num_documents:,} documents, {tally.num_tokens:,} tokens"
    words = f"{len(among)} of {len(job.inputs)} inputs: {counts}, {tally.num_rejected:,} rejected"
    if tally.num_rejected > job.max_rejected:
        words += (
            ", more than dataset.prepare.max_rejected: stopped; the last job fails with the list"
        )
    console.print(words, soft_wrap=True, markup=False)


def existing_result(job: Job, *, force: bool) -> Prepared | None:
    """Returns the result if the job is done already.

    Raises:
        DataError: another dataset exists at the prefix.
    """
    folder, card = partial_folder(job), read_card(job.prefix)
    if card is not None and card.job == job.hash:
        shutil.rmtree(folder.root, ignore_errors=True)
        return Prepared(job.prefix, card, existed=True)
    exists = card is not None or any(path.exists() for path in pair_paths(job.prefix))
    if exists and not force and not folder.is_complete():
        what = "another preparation" if card is not None else "a pair that was not prepared here"
        raise DataError(
            f"{job.prefix} has {what} ({card_path(job.prefix).name}, .bin, .idx): give another "
            "dataset.path, or force=true to replace it"
        )
    return None


def _refuse_too_many(job: Job, folder: PartialFolder, outputs: Outputs) -> None:
    if outputs.tally.num_rejected > job.max_rejected:
        with writing(folder.root):
            write_rejected(folder.too_many_rejected, outputs.paths)
        last = json.loads(str(read_arrays(outputs.paths[-1], "rejected")[0]))[-1]
        raise DataError(
            f"{outputs.tally.num_rejected:,} records cannot be read, more than "
            f"dataset.prepare.max_rejected={job.max_rejected}; the last: {last['file']}, line "
            f"{last['line']}: {last['reason']}; all of them in {folder.too_many_rejected}: fix the "
            "input, or raise the limit and run the same command again"
        )
