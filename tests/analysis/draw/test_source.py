from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from quantexp.analysis.draw.source import default_out, foreign, open_sources
from quantexp.analysis.tensors.place import Place
from quantexp.errors import CaptureError, ConfigError, RunError

from .conftest import Unhashed, normal, old_name


def test_a_run_and_its_tensors_folder_are_one_source(run: Unhashed) -> None:
    sources = open_sources([str(run.run_dir), str(run.dir)], {})
    assert [source.label for source in sources] == [run.run_dir.name]
    (source,) = sources
    assert source.scheme == "FA_linear_mxfp8"
    assert source.run is not None
    assert default_out([str(run.dir)], sources) == source.run.figures
    assert len(source.entries) == len(source.capture) == 6


def test_a_bare_folder_is_a_source_without_a_run(run: Unhashed, tmp_path: Path) -> None:
    bare = shutil.copytree(run.dir, tmp_path / "bare")
    (source,) = open_sources([str(bare)], {})
    assert (source.label, source.run, source.scheme) == ("bare", None, "mxfp8")
    assert default_out([str(bare)], [source]) == bare / "figures"


def test_places_of_an_old_collection_have_only_what_its_file_names_have(tmp_path: Path) -> None:
    torch.save({"tensor": normal(4, 4)}, tmp_path / old_name(1, "input", 3))
    torch.save({"tensor": normal(4, 4)}, tmp_path / "20250908_095220_0002_linear_forward_bf16_x.pt")
    (source,) = open_sources([str(tmp_path)], {})
    places = (Place.of(entry.metadata) for entry in source.capture)
    six, nine = sorted(places, key=lambda place: place.layer)
    assert (nine.layer, nine.module, nine.label) == (3, "fc1", "fc1 L3 forward input")
    assert (six.layer, six.module, six.label) == (-1, "linear", "linear forward x")


def test_a_folder_of_runs_and_a_sweeps_list_are_all_their_runs(
    run: Unhashed, tmp_path: Path
) -> None:
    other = shutil.copytree(run.run_dir, tmp_path / "llama32-1b_wikipedia_bf16-5e6f7a8b")
    listing = tmp_path / "sweeps" / "20260101_000000.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"runs": [{"run": other.name}, {"run": run.run_dir.name}]}))
    below = open_sources([str(tmp_path)], {})
    listed = open_sources([str(listing)], {})
    assert [source.label for source in listed] == [other.name, run.run_dir.name]
    assert {source.label for source in below} == {source.label for source in listed}
    assert default_out([str(tmp_path)], below) == tmp_path / "figures"
    assert default_out([str(listing)], listed) == listing.with_suffix("") / "figures"
    assert default_out(["a", "b"], below) == Path("figures")


def test_runs_of_a_sweep_without_a_folder_are_reported(run: Unhashed, tmp_path: Path) -> None:
    listing = tmp_path / "sweeps" / "20260101_000000.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"runs": [{"run": "gone-1a2b3c4d"}, {"run": run.run_dir.name}]}))
    messages: list[str] = []
    assert len(open_sources([str(listing)], {}, messages.append)) == 1
    (line,) = messages
    assert line.startswith("gone-1a2b3c4d: its folder is gone")


def test_a_sweeps_list_without_runs_is_refused(tmp_path: Path) -> None:
    listing = tmp_path / "sweeps" / "20260101_000000.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"runs": [{"run": None, "reason": "no data"}]}))
    with pytest.raises(CaptureError, match="none of its runs has a folder yet"):
        open_sources([str(listing)], {})
    listing.write_text("[]")
    with pytest.raises(RunError, match="is not a sweep's list of runs"):
        open_sources([str(listing)], {})


def test_runs_of_one_name_are_labelled_with_their_parent_folder(
    run: Unhashed, tmp_path: Path
) -> None:
    first, second = (tmp_path / name / run.run_dir.name for name in ("here", "there"))
    for copy in (first, second):
        shutil.copytree(run.run_dir, copy)
    labels = [source.label for source in open_sources([str(first), str(second)], {})]
    assert labels == [f"here-{run.run_dir.name}", f"there-{run.run_dir.name}"]


@pytest.mark.parametrize(
    ("filters", "tensors"),
    [
        ({"layer": "0"}, 3),
        ({"layer": "0-9"}, 6),
        ({"layer": "1", "tensor": "grad_*,input"}, 2),
        ({"operation": "backward"}, 2),
        ({"type": "mxfp8"}, 6),
        ({"type": "linear", "module": "fc?"}, 6),
        ({"rank": "0", "iteration": "1-3", "tensor": "weight"}, 2),
    ],
)
def test_filters_keep_the_matching_tensors(
    run: Unhashed, filters: dict[str, str], tensors: int
) -> None:
    (source,) = open_sources([str(run.run_dir)], filters)
    assert len(source.entries) == tensors


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"tensor": "quey"}, "no tensor called 'quey'; there are: grad_output, input, weight"),
        ({"tensor": "input,quey"}, "no tensor called 'quey'"),
        ({"layer": "7"}, "no layer '7'; there are: 0, 1$"),
        ({"type": "fp4"}, "no quantisation or layer type called 'fp4'; there are: linear, mxfp8"),
        ({"operation": "sideways"}, "no operation called 'sideways'; there are: backward, forward"),
    ],
)
def test_a_value_that_no_tensor_has_is_refused_with_the_existing_ones(
    run: Unhashed, filters: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sources([str(run.run_dir)], filters)


def test_long_lists_of_values_are_cut(run: Unhashed) -> None:
    for layer in range(2, 40):
        run.add(normal(2, 2), "input", layer=layer)
    with pytest.raises(ConfigError, match=r"there are: 0, 1, .*, 19 and 20 more"):
        open_sources([str(run.run_dir)], {"layer": "99"})


def test_a_filter_on_a_key_that_the_capture_lacks_is_refused(tmp_path: Path) -> None:
    torch.save({"tensor": normal(4, 4)}, tmp_path / old_name(1, "input"))
    with pytest.raises(
        ConfigError, match="no iteration '1'; neither a manifest, nor the files' names, nor"
    ):
        open_sources([str(tmp_path)], {"iteration": "1"})


def old(folder: Path, name: str, **metadata: object) -> None:
    folder.mkdir(exist_ok=True)
    torch.save({"tensor": normal(4, 4), "metadata": metadata}, folder / name)


def test_old_files_are_filtered_by_their_names_and_their_metadata(tmp_path: Path) -> None:
    for counter, layer in enumerate((0, 1, 3)):
        old(tmp_path, old_name(counter, "input", layer), iteration=counter, rank=0)
    six = "20250908_095220_0009_linear_forward_bf16_x.pt"
    old(tmp_path, six, iteration="2", rank=1, layer=3)

    def left(**filters: str) -> list[str]:
        (source,) = open_sources([str(tmp_path)], filters)
        return [entry.metadata["tensor"] for entry in source.capture]

    assert left(layer="1-2") == ["input"]
    assert left(type="mxfp8", module="fc1") == ["input"] * 3
    assert left(iteration="2") == ["input", "x"]
    assert left(rank="1") == ["x"]
    assert left(layer="3", rank="0") == ["input"]
    with pytest.raises(ConfigError, match=r"no iteration '7'; there are: 0, 1, 2$"):
        left(iteration="7")


def test_old_files_without_the_key_of_a_filter_are_left_out_and_counted(tmp_path: Path) -> None:
    old(tmp_path, old_name(1, "input"), iteration=4)
    old(tmp_path, old_name(2, "weight"), iteration=None)
    old(tmp_path, old_name(3, "output"), iteration="four")
    (tmp_path / old_name(4, "grad_output")).write_bytes(b"torn")
    messages: list[str] = []
    (source,) = open_sources([str(tmp_path)], {"iteration": "4"}, messages.append)
    assert [entry.metadata["tensor"] for entry in source.capture] == ["input"]
    torn, *others = messages
    assert torn.endswith("damaged, or holds more than tensors and plain data")
    assert old_name(4, "grad_output") in torn
    assert others == [
        f"{tmp_path.name}: 3 of 4 tensors do not say their iteration: they are left out"
    ]


def test_filters_that_leave_nothing_together_are_refused_with_what_each_leaves(
    run: Unhashed,
) -> None:
    run.add(normal(2, 2), "query", "attention", 5)
    message = (
        "no tensor fits all filters together; of 7 each alone leaves: layer=0 3, tensor=query 1"
    )
    with pytest.raises(CaptureError, match=message):
        open_sources([str(run.run_dir)], {"layer": "0", "tensor": "query"})


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError,
        match=r"there is no folder .*nowhere, and no run has that in its name; give a run",
    ):
        open_sources([str(tmp_path / "nowhere")], {})
    with pytest.raises(CaptureError, match="holds no captured tensors"):
        open_sources([str(tmp_path)], {})


def test_a_run_that_captured_nothing_is_a_source(run: Unhashed) -> None:
    shutil.rmtree(run.dir)
    (source,) = open_sources([str(run.run_dir)], {})
    assert (len(source.capture), source.entries, foreign([source])) == (0, [], [])


def test_files_that_are_no_captured_tensors_are_foreign(run: Unhashed) -> None:
    torch.save([1], run.dir / "mine.pt")
    ((name, why),) = foreign(open_sources([str(run.run_dir)], {"layer": "0"}))
    assert name == "mine.pt"
    assert "is none of the captured tensors" in why


def test_a_further_name_of_a_captured_file_is_not_foreign(run: Unhashed, tmp_path: Path) -> None:
    """As `capture.layout=by_type` links files, and a folder of such links beside the runs is drawn."""
    shared = tmp_path / "shared" / "mxfp8"
    shared.mkdir(parents=True)
    for file in run.dir.rglob("*.pt"):
        (shared / file.name).hardlink_to(file)
    assert foreign(open_sources([str(tmp_path / "shared")], {})) == []
    shutil.copytree(run.dir, tmp_path / "other")
    for file in (tmp_path / "other").rglob("*.pt"):
        (tmp_path / "other" / f"again-{file.name}").hardlink_to(file)
    assert foreign(open_sources([str(tmp_path / "other")], {})) == []
