"""What a capture reports while it goes on; status.json has it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of a capture."""

    tensors: int
    num_bytes: int
    #: The last captured tensor, as `L0-fc1 forward input`.
    current: str
    #: Why the capture has stopped; empty while it continues.
    stopped: str = ""
    #: Pending bytes, the write rate in bytes per second, and the seconds that training waited for room in the queue.
    queue_bytes: int = 0
    bytes_per_s: float = 0.0
    waited_s: float = 0.0
