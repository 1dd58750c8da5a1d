"""How a micro-batch reaches the device."""

from __future__ import annotations

from unittest.mock import Mock, call

import torch

from quantexp.training.megatron.passes import moved


def test_a_micro_batch_is_copied_to_a_gpu_from_pinned_memory_without_waiting() -> None:
    x, gpu = Mock(), torch.device("cuda", 0)
    assert moved(x, gpu) is x.pin_memory.return_value.to.return_value
    assert x.mock_calls == [call.pin_memory(), call.pin_memory().to(gpu, non_blocking=True)]


def test_on_a_cpu_a_micro_batch_stays_where_it_is() -> None:
    x = torch.ones(3)
    assert moved(x, torch.device("cpu")) is x
