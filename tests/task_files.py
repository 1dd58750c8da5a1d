"""Tasks of lm-evaluation-harness that tests write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

WORDS = ("time", "people", "water", "world", "history", "city", "river", "language")
NUM_DOCUMENTS = 12


def write_tasks(folder: Path) -> Path:
    """Write `next_word` (four answers each), `texts` (whole texts) and `written` (generated); returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [
        {
            "question": f"The {WORDS[i % 8]} of the {WORDS[(i * 3 + 1) % 8]} is",
            "choices": [f" {WORDS[(i + k) % 8]}" for k in range(4)],
            "answer": i % 4,
        }
        for i in range(NUM_DOCUMENTS)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    choice = {"doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "answer"}
    _write(folder, data, "next_word", "multiple_choice", ["acc", "acc_norm"], choice)
    whole = {"doc_to_text": "", "doc_to_target": "question"}
    _write(folder, data, "texts", "loglikelihood_rolling", ["bits_per_byte"], whole)
    options = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
    answer = {"doc_to_text": "question", "doc_to_target": "{{choices[answer]}}"}
    written = {**answer, "generation_kwargs": options}
    _write(folder, data, "written", "generate_until", ["exact_match"], written)
    return folder


def _write(
    folder: Path, data: Path, name: str, kind: str, metrics: list[str], keys: Mapping[str, object]
) -> None:
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "metric_list": [{"metric": metric} for metric in metrics],
        **keys,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))
