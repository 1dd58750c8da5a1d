from __future__ import annotations

import pytest

from quantexp.config.compose import compose

DEEPSEEK = ["model=deepseek2_lite", "parallel.unaligned=accept"]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], 1),
        (["launcher=slurm"], 1),
        (["parallel.tensor=2", "parallel.pipeline=4", "parallel.context=2"], 16),
        (["launcher=slurm", "launcher.nodes=3"], 3),
        (["launcher=slurm", "launcher.nodes=4", "launcher.gpus_per_node=8"], 32),
        (["launcher=slurm", "launcher.nodes=3", "parallel.tensor=2"], 6),
        (["parallel.tensor=2", "launcher.num_processes=4"], 4),
        (["parallel=llama32-1b_8x80"], 8),
        ([*DEEPSEEK, "parallel.tensor=2", "parallel.expert=4", "parallel.pipeline=2"], 8),
        ([*DEEPSEEK, "parallel.expert=2", "parallel.expert_tensor=2", "parallel.tensor=2"], 4),
    ],
)
def test_number_follows_from_the_request_and_the_layout(words: list[str], number: int) -> None:
    experiment = compose([*words, "training.global_batch_size=96"])
    assert experiment.launcher.num_processes == number
