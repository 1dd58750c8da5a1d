"""A model's weights are the same in every layout: initial ones, published ones, those that are read.

The outside oracle is one process: its initial weights, its published folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp.model.checkpoints import PADDING
from quantexp.model.layout import Layout
from quantexp.model.shards import axis_of
from quantexp.schema import ModelConfig
from tests.model.huggingface.layouts import LAYOUTS, MODELS, part_of

from .several_ranks import Rank, run_layouts

pytestmark = pytest.mark.slow

#: Reading /proc/self/io adds its own text to what it counts.
OWN_BYTES = 400
_CASES = {
    world: {case: each for case, each in LAYOUTS.items() if each[1].num_processes == world}
    for world in (2, 4)
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Rank]:
    """One process, by model."""
    cases = {family: (family, Layout()) for family in MODELS}
    return {family: ranks[0] for family, ranks in run_layouts(cases, root).items()}


@pytest.fixture(scope="module")
def ranks(root: Path, alone: dict[str, Rank]) -> dict[str, list[Rank]]:
    """The ranks of every layout."""
    by_case: dict[str, list[Rank]] = {}
    for cases in _CASES.values():
        by_case |= run_layouts(cases, root)
    return by_case


@pytest.mark.parametrize("case", LAYOUTS)
def test_initial_weights_are_those_of_one_process(
    case: str, ranks: dict[str, list[Rank]], alone: dict[str, Rank]
) -> None:
    whole = alone[LAYOUTS[case][0]].initial
    names: set[str] = set()
    for rank in ranks[case]:
        names |= rank.initial.keys()
        for name, (shard, tensor) in rank.initial.items():
            assert torch.equal(tensor, part_of(whole[name][1], shard)), (rank.place, name)
    assert names == whole.keys()


@pytest.mark.parametrize("case", LAYOUTS)
def test_published_folder_is_that_of_one_process_bit_for_bit(
    case: str, ranks: dict[str, list[Rank]], alone: dict[str, Rank], root: Path
) -> None:
    one, several = (
        root / name / "earlier" / "iteration_00000001" for name in (LAYOUTS[case][0], case)
    )
    files = {file.name for file in one.iterdir()}
    assert files == {"model.safetensors", "config.json", "hashes.json", PADDING}
    assert {file.name for file in several.iterdir()} == files
    for name in files:
        assert (several / name).read_bytes() == (one / name).read_bytes(), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_ranks_read_back_the_parts_that_they_published(
    case: str, ranks: dict[str, list[Rank]]
) -> None:
    for rank in ranks[case]:
        assert rank.loaded.keys() == rank.initial.keys()
        for name, tensor in rank.loaded.items():
            assert torch.equal(tensor, rank.initial[name][1]), (rank.place, name)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_rank_reads_the_bytes_of_its_own_parts_alone(
    case: str, ranks: dict[str, list[Rank]]
) -> None:
    """The files hold two bytes an element, padding included; the smallest model has 100 times `OWN_BYTES`."""
    for rank in ranks[case]:
        own = 2 * sum(tensor.numel() for tensor in rank.loaded.values())
        assert own <= rank.bytes_read <= own + OWN_BYTES


def test_ranks_hold_their_share_of_the_model(
    ranks: dict[str, list[Rank]], alone: dict[str, Rank]
) -> None:
    """With TP2 half of all but the norms, which are 1% here; so the test above is not about whole models."""

    def size(rank: Rank) -> int:
        return sum(tensor.numel() for tensor in rank.loaded.values())

    for rank in ranks["tp2"]:
        assert 0.5 < size(rank) / size(alone["llama31"]) < 0.51
    assert sum(map(size, ranks["pp2 interleaved"])) == size(alone["llama31"])
    assert alone["llama32"].loaded.keys() - ranks["pp2 tied"][1].loaded.keys()


@pytest.mark.parametrize("case", LAYOUTS)
def test_megatron_takes_the_right_parameters_for_divided(
    case: str, ranks: dict[str, list[Rank]]
) -> None:
    for rank in ranks[case]:
        assert rank.divided == {name for name in rank.initial if axis_of(name) is not None}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_weight_that_is_not_finite_ends_rank_0_and_those_that_write_it_with_its_name(
    case: str, ranks: dict[str, list[Rank]], root: Path
) -> None:
    model: ModelConfig = MODELS[LAYOUTS[case][0]]
    name = f"decoder.layers.{model.num_layers - 1}.self_attention.linear_proj.weight"
    folder = root / case / "checkpoints" / "iteration_00000003"
    first, *others = (rank.nonfinite for rank in ranks[case])
    for words in (first, *(each for each in others if each != "no error")):
        assert words.startswith(f"RunError: the checkpoint {folder} is not written: ")
        assert f" values are NaN or Inf in {name}; " in words
    assert [path.name for path in (root / case / "earlier").iterdir()] == ["iteration_00000001"]


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_folder_that_cannot_be_written_ends_every_rank_that_writes_with_its_error(
    case: str, ranks: dict[str, list[Rank]]
) -> None:
    for rank in ranks[case]:
        assert rank.unwritable.startswith("NotADirectoryError: [Errno 20] Not a directory: '")
