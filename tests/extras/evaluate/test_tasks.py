"""`quantexp evaluate tasks=...`: tasks of lm-evaluation-harness, and what is refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quantexp.cli.main import main
from quantexp.runs.paths import RunDir
from tests.extras.evaluate.test_verb import HELD_OUT, WORDS
from tests.task_files import NUM_DOCUMENTS, write_tasks

Captured = pytest.CaptureFixture[str]
START = "training.start_from=_bf16@2"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"evaluate.task_folder={write_tasks(tmp_path / 'tasks')}"


def refused(words: list[str], capsys: Captured) -> str:
    assert main(words) == 1
    return capsys.readouterr().err.removeprefix("quantexp: ").removesuffix("\n")


EVALUATE = ["evaluate", *WORDS, *HELD_OUT, START]


def test_tasks_are_for_evaluations(capsys: Captured) -> None:
    assert refused(["training=fast", "evaluate.tasks=[a]"], capsys) == (
        "evaluate.tasks belongs to quantexp evaluate, and this run trains"
    )


@pytest.mark.parametrize(
    "word", ["limit=2", "fewshot=1", "task_folder=mine", "score_template=false"]
)
def test_keys_of_tasks_need_one(word: str, capsys: Captured) -> None:
    assert refused([*EVALUATE, f"evaluate.{word}"], capsys) == (
        f"evaluate.{word} has no effect without tasks: add tasks=NAME, or drop it"
    )


def test_tasks_need_one_process(capsys: Captured) -> None:
    words = [*EVALUATE, "tasks=a", "launcher.num_processes=2", "training.micro_batch_size=1"]
    assert refused(words, capsys) == (
        "evaluate.tasks run in one process, got launcher.num_processes=2; drop the tasks, or evaluate in one process"
    )


@pytest.mark.parametrize("package", ["lm_eval", "transformers"])
def test_a_missing_package_has_its_remedy(
    package: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantexp.config.tasks.importlib.util.find_spec", lambda name: name != package or None
    )
    assert refused([*EVALUATE, "tasks=a"], capsys) == (
        f"evaluate.tasks needs the package {package}, which is not installed; pip install 'quantexp[lm-eval]'"
    )


def test_a_missing_folder_is_refused(capsys: Captured) -> None:
    assert refused([*EVALUATE, "tasks=a", "evaluate.task_folder=none"], capsys) == (
        "evaluate.task_folder must be a folder with task files, got none; correct the path"
    )


def test_an_unknown_task_is_refused_with_similar_names(
    folder: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    def of_the_folder(include_path: str, include_defaults: bool = True) -> TaskManager:
        """Without the harness's own 15,000 tasks, whose index takes 10 s."""
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", of_the_folder)
    path = folder.partition("=")[2]
    assert refused([*EVALUATE, folder, "tasks=texts,next_wrod"], capsys) == (
        f"evaluate.tasks: there is no task next_wrod in lm_eval nor in {path}; did you mean next_word?"
    )


def test_the_plan_names_them(folder: str, capsys: Captured) -> None:
    words = [*EVALUATE, folder, "tasks=texts,next_word", "dry_run=true"]
    assert main(words) == 1  # there is no run
    assert "texts, next_word: in bf16 and under the scheme, which" in capsys.readouterr().out


@pytest.mark.slow
def test_tasks_run_under_the_scheme_and_in_bf16(
    run_tiny: Callable[..., RunDir], cache: Path, folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The numbers in bf16 are those of transformers for the saved weights."""
    run = run_tiny("capture=off", "checkpoint.at_end=true", "training.precision=fp32")
    words = [*EVALUATE, f"paths.cache={cache}", "training.precision=fp32", "quant=linear_mxfp4"]
    words += [folder, "tasks=texts,next_word,written"]
    assert main([*words, "--json"]) == 0
    (record,) = json.loads(capfd.readouterr().out)
    results = {(one["task"], one["metric"]): one for one in record["evaluation"]["tasks"]}
    assert list(results) == [
        ("texts", "bits_per_byte"),
        ("next_word", "acc"),
        ("next_word", "acc_norm"),
        ("written", "exact_match"),
    ]
    documents = Path(folder.partition("=")[2]) / "documents.jsonl"
    texts = [json.loads(line)["question"] for line in documents.read_text().splitlines()]
    bits = results["texts", "bits_per_byte"]
    # Sums in another order: some 1e-7 of a logit.
    assert bits["bf16_value"] == pytest.approx(bits_per_byte(run, texts), rel=1e-6)
    assert bits["value"] != bits["bf16_value"]
    assert bits["interval"] is None, "a mean over bytes, not over documents"
    assert bits["changed"] == bits["documents"] == NUM_DOCUMENTS
    accuracy = results["next_word", "acc"]
    lines = [
        json.loads(line) for line in (Path(record["run"]) / "tasks.jsonl").read_text().splitlines()
    ]
    of_task = [line for line in lines if line["task"] == "next_word"]
    assert len(of_task) == accuracy["documents"] == NUM_DOCUMENTS
    for side, key in (("scheme", "value"), ("bf16", "bf16_value")):
        assert accuracy[key] == pytest.approx(
            sum(one[side]["acc"] for one in of_task) / NUM_DOCUMENTS
        )
    assert accuracy["changed"] == sum(one["scheme"]["acc"] != one["bf16"]["acc"] for one in of_task)
    low, high = accuracy["interval"]
    assert low <= accuracy["difference"] <= high
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert "skipped" in shown
    assert "bits_per_byte" in shown
    task_file = documents.with_name("written.yaml")
    task_file.write_text(task_file.read_text().replace('"max_gen_toks": 6', '"max_gen_toks": 5'))
    assert main([*words, "dry_run=true"]) == 0
    assert Path(record["run"]).name not in capfd.readouterr().out, (
        "another task is another evaluation"
    )
    assert main(["report", record["run"], "out=report.html"]) == 0
    assert "texts bits_per_byte" in Path("report.html").read_text()


@torch.no_grad()
def bits_per_byte(run: RunDir, texts: list[str]) -> float:
    """Of the published weights: each byte after those before it, the first after the end of a document."""
    (folder,) = (run.root / "checkpoints").iterdir()
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end, nats, num_bytes = 256, 0.0, 0
    for text in texts:
        tokens = torch.tensor([[end, *text.encode()]])
        log_p = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)
        nats -= float(log_p.gather(-1, tokens[0, 1:, None]).sum())
        num_bytes += len(text.encode())
    return nats / num_bytes / float(torch.tensor(2.0, dtype=torch.float64).log())
