"""The run folder of a Megatron-LM run, and what its identity holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantexp.errors import RunError, RunInUseError
from quantexp.extras.megatron_lm.described import experiment_of
from quantexp.extras.megatron_lm.folder import amax_histories, folder_of, identity_of, open_folder
from quantexp.extras.megatron_lm.run import LmRun
from quantexp.extras.megatron_lm.schemes import Schemes
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import codes_of, read_provenance
from quantexp.runs.ranks import Rank
from quantexp.runs.status import read_json, read_status, write_json, write_status
from tests.extras.megatron_lm.arguments import llama

_ARGS = llama(save="checkpoints", rank=3, tensorboard_dir="tb", log_interval=1, adam_eps=1e-8)
_EXPERIMENT = experiment_of(_ARGS, {"QUANTEXP_QUANT": "FA_mxfp8"})
_SCHEMES = Schemes(_EXPERIMENT.model, _EXPERIMENT.quant)
_IDENTITY = identity_of(_EXPERIMENT, _SCHEMES, _ARGS, "0.16.1", "cpu")


def test_the_folder_is_named_or_lies_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of(_EXPERIMENT, "ck", {"QUANTEXP_DIR": "here"}).root == tmp_path / "here"
    assert folder_of(_EXPERIMENT, "ck", {}).root == tmp_path / "ck" / "quantexp"
    named = folder_of(_EXPERIMENT, None, {}).root
    assert named.parent == tmp_path / "runs"
    assert re.fullmatch(r"megatron_lm_FA_mxfp8-\d{8}-\d{6}", named.name)
    gradient = {"QUANTEXP_QUANT": "FA_mxfp8", "QUANTEXP_GRADIENT": "layer"}
    named = folder_of(experiment_of(_ARGS, gradient), "ck", {}).root
    assert named.parent == tmp_path / "runs", "not over the training's"
    assert re.fullmatch(r"megatron_lm_FA_mxfp8_gradient-\d{8}-\d{6}", named.name)


def test_the_identity_has_the_loop_and_the_arguments_that_decide_numbers() -> None:
    assert _IDENTITY["loop"]["name"] == "Megatron-LM"
    assert _IDENTITY["loop"]["version"] == "0.16.1"
    arguments = _IDENTITY["arguments"]
    assert {"adam_eps", "seed", "num_layers", "hidden_size"} <= set(arguments)
    assert not {"save", "rank", "tensorboard_dir", "log_interval"} & set(arguments)
    assert json.loads(json.dumps(_IDENTITY))


def test_a_start_without_a_checkpoint_moves_the_earlier_attempt_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert open_folder(run, _EXPERIMENT, _IDENTITY, 0) is None
    status = read_status(run.status)
    assert status is not None
    assert status.iterations == 3
    run.lock.unlink()  # of this process, which holds it to its end
    assert open_folder(run, _EXPERIMENT, _IDENTITY, 2) is None  # it completed no iteration
    assert (run.attempts / "1" / "status.json").is_file()


def test_a_start_that_goes_on_with_other_code_logs_and_records_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.training.log.LOG.propagate", True)
    run = RunDir(tmp_path / "run")
    open_folder(run, _EXPERIMENT, _IDENTITY, 0)
    status, recorded = read_status(run.status), read_json(run.provenance)
    assert status is not None
    write_status(run.status, replace(status, iteration=2, started="2026-01-01"))
    write_json(run.provenance, {**recorded, "code": "0123456789abcdef"})
    run.lock.unlink()
    assert open_folder(run, _EXPERIMENT, _IDENTITY, 2) == 2
    change = f"code 0123456789abcdef -> {recorded['code']}"
    assert caplog.messages == [f"goes on from iteration 2 with changes: {change}"]
    provenance = read_provenance(run.provenance)
    assert provenance["starts"][0]["changed"] == [change]
    assert codes_of(provenance) == ["0123456789abcdef", recorded["code"]]


def test_a_folder_in_use_or_without_room_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    open_folder(run, _EXPERIMENT, _IDENTITY, 0)
    with pytest.raises(RunInUseError, match=r"run is in use by .*; wait for it, or stop it first"):
        open_folder(run, _EXPERIMENT, _IDENTITY, 0)
    (tmp_path / "file").touch()
    words = (
        r"the run folder .*file/run cannot be written: Not a directory; set QUANTEXP_DIR to a fo"
    )
    with pytest.raises(RunError, match=words):
        open_folder(RunDir(tmp_path / "file" / "run"), _EXPERIMENT, _IDENTITY, 0)


@pytest.mark.parametrize("has_file", [True, False])
def test_histories_come_from_beside_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_file: bool
) -> None:
    run = RunDir(tmp_path / "run")
    file = amax_histories(run, 5)
    assert file == tmp_path / "run" / "amax_histories" / "00000005.json"
    if has_file:
        file.parent.mkdir(parents=True)
        file.write_text('{"stream": {}}')
    loaded: list[object] = []
    state = SimpleNamespace(load_state_dict=lambda content, device: loaded.append(content))
    this = SimpleNamespace(
        context=SimpleNamespace(run=run),
        args=SimpleNamespace(iteration=5, load="elsewhere"),
        experiment=_EXPERIMENT,
        rank=Rank(),
        state=state,
        device="cpu",
    )
    with caplog.at_level("WARNING"):
        LmRun._load_histories(this, has_history=True)  # type: ignore[arg-type]
    assert loaded == ([{"stream": {}}] if has_file else [])
    missing = f"{file} is missing: the amax histories of delayed scales begin anew"
    assert [each.message for each in caplog.records] == ([] if has_file else [missing])
