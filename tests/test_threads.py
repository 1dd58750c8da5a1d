"""Torch's threads, for work whose tensors are small."""

from __future__ import annotations

import torch

from quantexp.threads import threads


def test_threads_are_fewer_for_a_while_and_never_more() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads(1):
            assert torch.get_num_threads() == 1
            with threads(99):
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
