"""Collectives with one rank; `test_data_parallel` tests several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import gather, is_lost_peer, mean_over_data_parallel
from quantexp.training.megatron.session import session

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"


def test_collectives_of_a_single_rank_return_its_own_value(tiny: Callable[..., Experiment]) -> None:
    with session(tiny().training):
        assert gather({"a": 1}) == [{"a": 1}]
        assert mean_over_data_parallel(torch.tensor(3.0)) == 3.0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (torch.distributed.DistNetworkError("the server socket has timed out"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("gloo/"), False),
    ],
)
def test_loss_of_another_rank_is_distinguished_from_an_own_failure(
    error: Exception, lost: bool
) -> None:
    assert is_lost_peer(error) is lost
