"""A file of TensorBoard events, each written through to the file before the call returns.

There is no thread and no buffer: what a full disk leaves of a record is the file's end, which readers pass over, and
nothing is left to fail again when the file is closed.

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

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

#: What event files of today begin with.
_VERSION = "brain.Event:2"


class EventFile:
    """A new event file in a folder; times are seconds since 1970, UTC."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        name = f"events.out.tfevents.{now:017.6f}.{platform.node()}.{os.getpid()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._write(Event(wall_time=now, file_version=_VERSION))

    def scalars(self, time_s: float, step: int, values: Mapping[str, float]) -> None:
        """One value of each curve, as float32; NaN and Inf stay."""
        self._values(
            time_s, step, [Summary.Value(tag=t, simple_value=x) for t, x in values.items()]
        )

    def text(self, time_s: float, tag: str, text: str) -> None:
        """Markdown for the Text page."""
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            string_val=[text.encode()],
        )
        described = create_summary_metadata(tag, "")
        self._values(time_s, 0, [Summary.Value(tag=tag, metadata=described, tensor=tensor)])

    def session_start(self, time_s: float, values: Mapping[str, str | int | float | bool]) -> None:
        """The run's row on the HParams page."""
        info = SessionStartInfo(start_time_secs=time_s)
        for key, value in values.items():
            if isinstance(value, bool):
                info.hparams[key].bool_value = value
            elif isinstance(value, str):
                info.hparams[key].string_value = value
            else:
                info.hparams[key].number_value = value
        content = HParamsPluginData(session_start_info=info)
        self._hparams(time_s, metadata.SESSION_START_INFO_TAG, content)

    def session_end(self, time_s: float, success: bool) -> None:
        """How the row ends."""
        status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
        content = HParamsPluginData(
            session_end_info=SessionEndInfo(end_time_secs=time_s, status=status)
        )
        self._hparams(time_s, metadata.SESSION_END_INFO_TAG, content)

    def take_back(self, time_s: float, step: int) -> None:
        """Have a reader forget what earlier files of the folder say of this step and of later ones."""
        log = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time_s, step=step, session_log=log))

    def close(self) -> None:
        """Nothing is written any more."""
        self._file.close()

    def _hparams(self, time_s: float, tag: str, content: Any) -> None:
        described = metadata.create_summary_metadata(content)
        value = Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)
        self._values(time_s, 0, [value])

    def _values(self, time_s: float, step: int, values: list[Any]) -> None:
        self._write(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        record = io.BytesIO()
        try:
            RecordWriter(record).write(event.SerializeToString())
            left = record.getvalue()
            while left:  # a write may stop halfway, and says why only when it is asked to go on
                left = left[self._file.write(left) or 0 :]
        except OSError:  # what comes after half a record could not be read
            self._file.close()
            raise
