"""A checkpoint from the shards of its ranks: the same bytes whatever the layout, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantexp.errors import RunError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoint_writer import (
    Draft,
    complete,
    discard,
    remove_leftovers,
    write_part,
)
from quantexp.model.checkpoints import folder_of, saved_iterations
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.layout import Layout
from quantexp.model.publish import write_published
from quantexp.model.rank_records import RankRecord, await_records, write_record
from quantexp.model.saved_tensors import SavedTensors
from quantexp.model.training_state import read_index
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment, Precision
from quantexp.training.megatron.state_shards import index_of
from tests.model.small_checkpoints import MODEL, PUBLISHED, save, state_of, tiny_llama, whole

ALL = {"model.safetensors", "padding.safetensors", "config.json", "hashes.json", "state"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("precision", Precision)
def test_published_form_has_the_bits_of_the_rounded_main_weights_in_any_layout(
    tmp_path: Path, precision: Precision
) -> None:
    """torch's own conversion of what Megatron would publish, found by rows of its parameters."""
    folders = []
    for ranks in (1, 2):
        run, experiment = RunDir(tmp_path / str(ranks)), tiny_llama(ranks)
        experiment.training.precision = precision
        save(run, experiment, 3)
        require_intact(folder_of(run, 3))
        assert names(folder_of(run, 3)) == ALL
        folders.append(folder_of(run, 3))
    one, two = folders
    for file in ("model.safetensors", "padding.safetensors", "config.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes()
    published = load_file(two / "model.safetensors") | load_file(two / "padding.safetensors")
    assert published.keys() == {*PUBLISHED, *load_file(two / "padding.safetensors")}
    for parameter in mapping(MODEL):
        rows = [published[r.tensor][r.first : r.first + r.count] for r in parameter.rows]
        main = whole(3)[f"main/{parameter.name}"]
        assert torch.equal(torch.cat(rows), main.to(rows[0].dtype)), parameter.name
        assert rows[0].dtype is getattr(torch, DTYPES[precision])


DTYPES = {Precision.bf16: "bfloat16", Precision.fp16: "float16", Precision.fp32: "float32"}


def test_without_publishing_there_are_shards_alone_and_they_make_the_same_bytes(
    tmp_path: Path,
) -> None:
    published, shards = RunDir(tmp_path / "published"), RunDir(tmp_path / "shards")
    save(published, tiny_llama(2), 1)
    save(shards, tiny_llama(2, publish=False), 1)
    folder = folder_of(shards, 1)
    assert names(folder) == {"config.json", "hashes.json", "state"}
    require_intact(folder)
    files = read_index(folder / "state" / "state.json").files
    tensors = SavedTensors.open(folder / "state", files, MODEL, Precision.bf16)
    (tmp_path / "export").mkdir()
    write_published(tensors, MODEL, tmp_path / "export")
    for file in ("model.safetensors", "config.json"):
        content = (folder_of(published, 1) / file).read_bytes()
        assert (tmp_path / "export" / file).read_bytes() == content
    assert (folder / "config.json").read_bytes() == content


def test_without_the_optimizer_the_shards_go_once_the_form_is_made(tmp_path: Path) -> None:
    run, experiment = RunDir(tmp_path), tiny_llama(optimizer=False)
    draft = Draft(folder_of(run, 1), "token")
    state = state_of(experiment, 0, 1)
    tensors = {name: x for name, x in state.named_tensors() if name.startswith("main/")}
    write(draft, experiment, tensors, 0)
    finish(draft, experiment)
    assert names(folder_of(run, 1)) == ALL - {"state"}
    require_intact(folder_of(run, 1))


def write(draft: Draft, experiment: Experiment, tensors: dict[str, Any], rank: int) -> None:
    """A rank's part and record."""
    pieces = {name: each.piece for name, each in state_of(experiment, rank, 1).pieces.items()}
    record = RankRecord(hashes=write_part(draft, rank, tensors, pieces, {}))
    write_record(draft.part, rank, record)


def finish(draft: Draft, experiment: Experiment) -> None:
    """As rank 0."""
    index = index_of(state_of(experiment, 0, 1), 1, Layout.of(experiment), 3)
    complete(draft, experiment, await_records(draft.part, draft.num_ranks), index)


def test_index_has_the_files_of_all_ranks_and_the_steps_that_were_left_out(
    tmp_path: Path,
) -> None:
    run, experiment = RunDir(tmp_path), tiny_llama(2)
    draft = Draft(folder_of(run, 1), "token", 2)
    for rank in (1, 0):
        write(draft, experiment, dict(state_of(experiment, rank, 1).named_tensors()), rank)
    finish(draft, experiment)
    index = read_index(folder_of(run, 1) / "state" / "state.json")
    assert (index.version, index.iteration, index.nonfinite) == (2, 1, 3)
    hashes = json.loads((folder_of(run, 1) / "hashes.json").read_text())["files"]
    assert index.files == {
        f"rank0000{i}.safetensors": hashes[f"state/rank0000{i}.safetensors"]["xxh3_128"]
        for i in (0, 1)
    }
    assert index.layout["tensor"] == 2


def test_a_folder_with_the_name_is_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (folder_of(run, 1) / "state").mkdir(parents=True)
    (folder_of(run, 1) / "old").write_text("")
    save(run, tiny_llama(), 1)
    assert names(folder_of(run, 1)) == ALL
    assert names(run.checkpoints) == {folder_of(run, 1).name}


def test_a_main_weight_beyond_the_working_dtype_is_named(tmp_path: Path) -> None:
    """It is finite in fp32; the model's weight is not."""
    run, experiment = RunDir(tmp_path), tiny_llama()
    experiment.training.precision = Precision.fp16
    draft = Draft(folder_of(run, 1), "token")
    tensors = dict(state_of(experiment, 0, 1).named_tensors())
    tensors["main/decoder.layers.0.mlp.linear_fc2.weight"].view(-1)[5] = 1e5
    write(draft, experiment, tensors, 0)
    with pytest.raises(
        RunError,
        match=r"iteration_00000001 is not written: 1 of 96 values are NaN or Inf in "
        r"model\.layers\.0\.mlp\.down_proj\.weight; start from an earlier",
    ):
        finish(draft, experiment)
    assert saved_iterations(run) == []


def test_what_an_earlier_start_left_is_in_nobodys_way_and_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    killed = Draft(folder_of(run, 1), "earlier")
    (killed.part / "state").mkdir(parents=True)
    (killed.part / "state" / "rank00000.safetensors").write_text("half")
    save(run, tiny_llama(), 1)
    require_intact(folder_of(run, 1))
    remove_leftovers(run.checkpoints)
    assert names(run.checkpoints) == {folder_of(run, 1).name}


def test_failed_checkpoint_goes_when_no_rank_writes_into_it(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "iteration_00000001", "token", 2)
    (draft.part / "state").mkdir(parents=True)
    discard(draft, 0.02)
    assert draft.part.is_dir(), "rank 1 may still write"
    write_record(draft.part, 1, RankRecord())
    discard(draft, 0.02)
    assert not draft.part.exists()


def test_checkpoint_that_fails_after_all_parts_came_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' records are gone by then, so nothing may wait for them."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run, experiment = RunDir(tmp_path), tiny_llama()
    draft = Draft(folder_of(run, 1), "token")
    write(draft, experiment, dict(state_of(experiment, 0, 1).named_tensors()), 0)
    monkeypatch.setattr("quantexp.model.checkpoint_writer.record_hashes", fail)
    with pytest.raises(OSError, match="No space left"):
        finish(draft, experiment)
    assert list(run.checkpoints.iterdir()) == []


def test_another_start_that_took_over_keeps_the_name(tmp_path: Path) -> None:
    run, experiment = RunDir(tmp_path), tiny_llama()
    draft = Draft(folder_of(run, 1), "token")
    write(draft, experiment, dict(state_of(experiment, 0, 1).named_tensors()), 0)
    index = index_of(state_of(experiment, 0, 1), 1, Layout(), 0)

    def refuse() -> None:
        raise RunError("another start writes")

    with pytest.raises(RunError, match="another start writes"):
        complete(draft, experiment, await_records(draft.part, 1), index, refuse)
    assert saved_iterations(run) == []
