"""What ranks tell one another; with several it is tested in `test_data_parallel`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import gather, lost_peer, mean_over_data_parallel
from quantexp.training.megatron.session import session

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"


def test_only_rank_is_its_own_mean_and_all_there_is(tiny: Callable[..., Experiment]) -> None:
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
def test_other_ranks_loss_is_told_from_an_own_failure(error: Exception, lost: bool) -> None:
    assert lost_peer(error) is lost
