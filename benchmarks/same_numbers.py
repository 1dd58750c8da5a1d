"""Whether a change of the code leaves every number as it was: plans, run hashes, losses, captured bytes, figures.

    python benchmarks/same_numbers.py record before.json      before the change
    python benchmarks/same_numbers.py record after.json       after it
    python benchmarks/same_numbers.py compare before.json after.json

The fixed set has 79 experiments. 30 are trained for two iterations with every tensor captured: the ten schemes on
each of the three shipped models, cut to a width of 128. 49 are planned only: the ten schemes on each model in full, and
every scheme of `quant/more`. Each entry of the file is a string or a number that must not change, on one machine with
one torch. A file's hash stands for its content; times, speeds and paths are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = ("llama32-1b", "llama31-8b", "deepseek2_lite")
#: The words that cut each model to a width of 128.
CUT = [
    "training=fast",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=192",
    "model.num_attention_heads=4",
    "training.seq_length=64",
    "training.iterations=2",
    "training.warmup_iterations=1",
]
CUT_MODEL = {
    "llama32-1b": ["model.num_query_groups=2", "model.head_dim=32"],
    "llama31-8b": ["model.num_query_groups=1", "model.head_dim=32"],
    "deepseek2_lite": [
        "model.num_query_groups=4",
        "model.head_dim=40",
        "model.mla.kv_lora_rank=48",
        "model.mla.qk_head_dim=24",
        "model.mla.qk_pos_emb_head_dim=16",
        "model.mla.v_head_dim=20",
        "model.moe.num_experts=4",
        "model.moe.top_k=2",
        "model.moe.expert_ffn_hidden_size=40",
    ],
}
#: Keys of plans and figures whose values are measured, or name a place or a moment. All others must not change.
MEASURED = {"time_s", "product_gflop_per_s", "tracking", "commands", "of"}
#: What the name of a captured tensor's file begins with.
STARTED = re.compile(r"\b\d{8}_\d{6}_")


def main() -> None:
    """Record the set, or compare two records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record").add_argument("file", type=Path)
    compare = verbs.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "record":
        arguments.file.write_text(json.dumps(dict(sorted(recorded())), indent=1) + "\n")
    else:
        sys.exit(compared(arguments.before, arguments.after))


def recorded() -> Iterator[tuple[str, Any]]:
    """Name and value of every number of the set."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = sorted(Path(__file__).parents[1].glob("conf/quant/more/*.yaml"))
        for words in (
            *([f"model={model}", "quant=glob(*)"] for model in MODELS),
            ["quant=" + ",".join(f"more/{file.stem}" for file in more)],
        ):
            # Exit code 1: the text of these datasets is not here, so that the runs would not start.
            text = quantexp(folder, "plan", "--json", "-m", "memory=ignore", *words, codes=(0, 1))
            plans = json.loads(text)
            for i, plan in enumerate(plans["points"] if isinstance(plans, dict) else plans):
                yield from leaves(f"plan {words[0]} {i}", plan)
        for model in MODELS:
            words = ["-m", f"model={model}", *CUT, *CUT_MODEL[model], "quant=glob(*)"]
            quantexp(folder, *words, f"paths.root={model}", f"paths.cache={folder / 'cache'}")
            for run in sorted(file.parent for file in (folder / model).glob("*/config.yaml")):
                yield from of_run(run)
            one = next((folder / model).glob("*FA_linear_mxfp8-*"))
            quantexp(folder, "draw", str(one), "out=drawn", "--only", "quick_analysis")
            quantexp(folder, "draw", str(one), "out=drawn", "--only", "statistics")
            for file in sorted((folder / "drawn").rglob("[!.]*.json")):
                document = json.loads(STARTED.sub("", file.read_text()))
                yield from leaves(f"drawn {model} {file.name}", document)


def of_run(run: Path) -> Iterator[tuple[str, Any]]:
    """The name of the run's folder has its hash; losses, the proof, and each captured tensor's hash."""
    yield f"run {run.name}", json.loads((run / "status.json").read_text())["state"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for key in ("loss", "grad_norm", "lr", "tokens"):
            yield f"run {run.name} {values['iteration']} {key}", values[key]
    yield from leaves(f"run {run.name} precision", json.loads((run / "precision.json").read_text()))
    for text in (run / "tensors" / "manifest.jsonl").read_text().splitlines():
        line = json.loads(text)
        name = STARTED.sub("", Path(line["file"]).name)
        content = json.dumps({k: v for k, v in line.items() if k != "file"}, sort_keys=True)
        yield f"run {run.name} {line.get('phase')} {name}", digest(content)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of a nested document, each with its keys, but for what is measured; lists as one hash."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in MEASURED:
                yield from leaves(f"{name} {key}", inner)
    elif isinstance(value, list):
        inner = [dict(leaves("", entry)) for entry in value]
        yield name, digest(json.dumps(inner, sort_keys=True))
    else:
        yield name, value


def digest(text: str) -> str:
    """A short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def quantexp(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What the command prints; it must exit with one of the codes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", "quantexp", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in codes:
        sys.exit(f"quantexp {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def compared(before: Path, after: Path) -> int:
    """Print what differs; 1 if anything does."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    for key in differing[:40]:
        print(f"{key}: {old.get(key)} -> {new.get(key)}")  # noqa: T201
    print(f"{len(differing)} of {len(old)} values differ")  # noqa: T201
    return int(bool(differing) or not old)


if __name__ == "__main__":
    main()
