"""Torch's threads, for work whose tensors are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on so many threads, at most as many as before.

    Many operations on small tensors are no faster on several threads, and on cores that are busy with something else
    up to a hundred times slower, because the threads wait for each other at the end of every one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
