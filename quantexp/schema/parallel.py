"""Configuration of model parallelism: how one model is divided over the processes of a run.

The data-parallel size follows: launcher.num_processes / (tensor x pipeline x context). The numbers of a run depend on
the layout only where `quantexp.quant.alignment` lists slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantexp.schema.limits import between, limited

_SIZE = between(1, 65_536)


class Dispatcher(Enum):
    """How tokens reach the ranks that hold their experts."""

    #: Every rank receives all tokens of its group and keeps those of its experts.
    allgather = "allgather"
    #: Every rank sends each token to the ranks of its experts only.
    alltoall = "alltoall"


class Unaligned(Enum):
    """How to treat a layout in which blocks of some slots fall otherwise than in one process."""

    #: Refuse it, and name the slots.
    refuse = "refuse"
    #: Run it; the layout is then part of the run's identity.
    accept = "accept"


@dataclass
class ParallelConfig:
    """The layout of one model over the processes of a run."""

    #: A layout by name; the choice `auto` takes the first of those that `quantexp plan` lists.
    name: str = "none"
    #: Ranks that share each layer: heads and widths are divided (tensor parallelism, arXiv 1909.08053).
    tensor: int = limited(1, *_SIZE)
    #: Divide the tokens between the ranks of a tensor-parallel group outside the products (sequence parallelism, arXiv
    #: 2205.05198); null means yes if tensor is above 1.
    sequence: bool | None = None
    #: Stages: each holds some of the layers (pipeline parallelism).
    pipeline: int = limited(1, *_SIZE)
    #: Chunks of layers a stage, interleaved (arXiv 2104.04473); 1 means none.
    virtual_pipeline: int = limited(1, *_SIZE)
    #: Ranks that share the routed experts of a layer.
    expert: int = limited(1, *_SIZE)
    #: Ranks that share each routed expert; null means as `tensor`, or 1 where `expert` leaves no ranks for it.
    expert_tensor: int | None = limited(None, *_SIZE)
    #: Ranks that share each sequence (context parallelism).
    context: int = limited(1, *_SIZE)
    dispatcher: Dispatcher = Dispatcher.allgather
    unaligned: Unaligned = Unaligned.refuse
    #: Choose the layout: the first that fits, of those that `quantexp plan` lists.
    auto: bool = False
