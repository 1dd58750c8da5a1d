"""A file of TensorBoard events, each written to the file before the call returns.

There is no thread and no buffer. A full disk leaves part of a record at the file's end, which readers skip, and closing
the file cannot fail again.

Source of the format: tensorboard/compat/proto/event.proto and tensorboard/plugins/{text,hparams} of TensorBoard.
"""

from __future__ import annotations

import io
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from quantexp.capture.statistics.counts import Counts

#: The start of the name of every event file.
PREFIX = "events.out.tfevents."
#: The version at the beginning of an event file.
_VERSION = "brain.Event:2"


class EventFile:
    """A new event file in a folder; times are seconds since 1970, UTC."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        name = f"{PREFIX}{now:017.6f}.{platform.node()}.{os.getpid()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._write(Event(wall_time=now, file_version=_VERSION))

    def scalars(self, time_s: float, step: int, values: Mapping[str, float]) -> None:
        """Add a value to each curve, as float32; NaN and Inf are kept."""
        summary = Summary(value=[Summary.Value(tag=t, simple_value=x) for t, x in values.items()])
        self._write(Event(wall_time=time_s, step=step, summary=summary))

    def histograms(self, time_s: float, step: int, histograms: Mapping[str, Counts]) -> None:
        """Add counts of integers to each histogram; an integer's bucket is the range up to the next one."""
        values = [Summary.Value(tag=tag, histo=_buckets(c)) for tag, c in histograms.items()]
        self._write(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def text(self, time_s: float, tag: str, text: str) -> None:
        """Add Markdown to the Text page."""
        self._write(Event(wall_time=time_s, summary=text_pb(tag, text)))

    def session_start(self, time_s: float, values: Mapping[str, str | int | float | bool]) -> None:
        """Add the run's row to the HParams page, in a group of its own."""
        summary = hparams_pb(dict(values), trial_id="", start_time_secs=time_s)
        self._write(Event(wall_time=time_s, summary=summary))

    def session_end(self, time_s: float, success: bool) -> None:
        """End the run's row on the HParams page."""
        status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
        end = HParamsPluginData(
            session_end_info=SessionEndInfo(end_time_secs=time_s, status=status)
        )
        value = Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(end),
            tensor=metadata.NULL_TENSOR,
        )
        self._write(Event(wall_time=time_s, summary=Summary(value=[value])))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        record = io.BytesIO()
        try:
            RecordWriter(record).write(event.SerializeToString())
            rest = record.getvalue()
            while rest:  # a write may stop halfway, and only the next one raises the reason
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:  # readers could not read what follows half a record
            self._file.close()
            raise


def _buckets(counts: Counts) -> HistogramProto:
    return HistogramProto(
        min=counts.first,
        max=counts.first + len(counts.counts),
        num=counts.total,
        sum=sum(value * count for value, count in counts.items()),
        sum_squares=sum(value**2 * count for value, count in counts.items()),
        bucket_limit=[value + 1 for value, _ in counts.items()],
        bucket=counts.counts,
    )
