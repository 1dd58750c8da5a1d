"""Kills runs at random moments and lets them go on, then compares each with a run that nobody disturbed.

    python benchmarks/kills.py [--kills 20] [--seed 0] [--only tp2] [--folder FOLDER]

Every case (`CASES`) is a tiny run that saves a checkpoint every few iterations and captures tensors. It is killed
`--kills` times: the command, or one of its ranks, by SIGKILL, or by SIGTERM; four of five at a moment drawn evenly from
the time in which it trains, the others before. Then the same command goes on. If it ends before the next kill, it is
compared and started anew. A line for each case has its kills, by what they hit, how many runs ended, and what differs
in one of them from the undisturbed run: loss, gradient norm, learning rate and loss scale of every iteration, the lines
of the capture's manifest and statistics (which have a hash of every tensor), the steps in TensorBoard, and the files of
the last checkpoint with main weights and moments, bit for bit. `docs/checkpoints.md` has the table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

ITERATIONS = 60
TINY = [
    *("training=fast", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.seq_length=64", "training.micro_batch_size=1", "training.global_batch_size=2"),
    *(f"training.iterations={ITERATIONS}", "training.warmup_iterations=4", "analysis.auto=false"),
    *("checkpoint.every=6", "checkpoint.optimizer=true", "checkpoint.at_end=true"),
    *("checkpoint.keep_last=2", "capture=tensors", "capture.every=15", "launcher.num_threads=1"),
    *("evaluation.every=20", "evaluation.samples=4", "tracking.tensorboard=true"),
]
EXPERTS = [
    *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=64"),
    *("model.mla.kv_lora_rank=64", "model.mla.qk_head_dim=32", "model.mla.qk_pos_emb_head_dim=32"),
    *("model.mla.v_head_dim=32", "model.moe.num_experts=4", "model.moe.top_k=2"),
    "model.moe.expert_ffn_hidden_size=64",
]
RULES = "quant.rules=[{iterations: [20, 40], format: bf16}, {layers: [0], format: bf16}]"
#: Name -> words after `TINY`.
CASES = {
    "mxfp4": ["quant=linear_mxfp4"],
    "rules": ["quant=linear_mxfp4", RULES],
    "stochastic": ["quant=more/linear_mxfp4_sr_rht"],
    "delayed": ["quant=more/linear_fp8_delayed"],
    "fp16": [
        "quant=linear_mxfp8",
        "training.precision=fp16",
        "training.initial_loss_scale=268435456",
    ],
    "recompute": ["quant=FA_linear_mxfp8", "training.recompute=full"],
    "muon": [
        "quant=linear_mxfp8",
        "training.optimizer=muon",
        "quant.optimizer.momentum.format=mxfp8",
        "quant.optimizer.momentum.rounding=stochastic",
    ],
    "eco": ["quant=more/adam_fp8_eco", "quant/linear=mxfp8"],
    "eco dp2": ["quant=more/adam_fp8_eco", "launcher.num_processes=2"],
    "pulls": ["quant=more/linear_mxfp4_cage", "quant.optimizer.pull.start=0.3"],
    "smooth": ["quant=more/smooth_int4"],
    "smooth dp2": ["quant=more/smooth_int4", "launcher.num_processes=2"],
    "resets": [
        "quant=more/linear_nvfp4_tetrajet_v2_reset",
        "quant.optimizer.reset={every: 3, over: 1, ratio: 1.5, start: 0}",
    ],
    "resets dp2": [
        "quant=more/linear_nvfp4_tetrajet_v2_reset",
        "quant.optimizer.reset={every: 8, over: 6, ratio: 2, start: 0}",
        "launcher.num_processes=2",
    ],
    "dp2": ["quant=FA_linear_mxfp8", "launcher.num_processes=2"],
    "tp2": ["quant=FA_linear_mxfp8", "launcher.num_processes=2", "parallel.tensor=2"],
    "pp2": ["quant=linear_mxfp4", "launcher.num_processes=2", "parallel.pipeline=2"],
    "cp2": [
        "quant=linear_mxfp8",
        "launcher.num_processes=2",
        "parallel.context=2",
        "training.seq_length=128",
    ],
    "ep2": [*EXPERTS, "quant=linear_mxfp8", "launcher.num_processes=2", "parallel.expert=2"],
}
#: What measures the machine, and differs in every run.
_MEASURED = {"time", "step_time_s", "tokens_per_s", "tflops", "memory_gb", "mfu"}
_STAMP = re.compile(r"\d{8}_\d{6}")


#: Of five kills so many hit a run that trains.
_IN_TRAINING = 0.8


@dataclass
class Killed:
    """What became of a run that was killed again and again."""

    #: `command SIGKILL` -> how often.
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    #: Runs that came to their end, and what differs in one of them.
    ended: int = 0
    differ: set[str] = field(default_factory=set)
    #: Iterations that were computed more than once.
    lost: int = 0


def run(words: Sequence[str], root: Path) -> Path:
    """Run to the end; the run's folder.

    Raises:
        RuntimeError: it failed, with the end of its output.
    """
    done = subprocess.run(_command(words, root), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return folder_in(root)


def folder_in(root: Path) -> Path:
    """The one run in a root."""
    (config,) = root.glob("*/config.yaml")
    return config.parent


def kill_and_go_on(
    words: Sequence[str], root: Path, undisturbed: Path, kills: int, seed: int
) -> Killed:
    """Start a run again and again, kill it so many times at random moments, then let it end."""
    chance, killed = random.Random(seed), Killed()
    while killed.kills.total() < kills:
        if not _start_and_kill(words, root, chance, _training_s(undisturbed), killed):
            _compare(root, undisturbed, killed)
            shutil.rmtree(folder_in(root))
    run(words, root)
    _compare(root, undisturbed, killed)
    return killed


def _compare(root: Path, undisturbed: Path, killed: Killed) -> None:
    folder = folder_in(root)
    killed.ended += 1
    killed.differ |= set(differences(undisturbed, folder))
    restarts = json.loads((folder / "status.json").read_text())["restarts"]
    killed.lost += sum(each["lost"] for each in restarts)


def _training_s(folder: Path) -> float:
    """Seconds between the first iteration and the last."""
    times = [
        json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    first, last = (datetime.fromisoformat(times[i]) for i in (0, -1))
    return (last - first).total_seconds()


def _command(words: Sequence[str], root: Path) -> list[str]:
    return [sys.executable, "-m", "quantexp", *TINY, *words, f"paths.root={root}"]


def _start_and_kill(
    words: Sequence[str], root: Path, chance: random.Random, training_s: float, killed: Killed
) -> bool:
    """One start; false if it came to its end before it was killed."""
    process = subprocess.Popen(
        _command(words, root),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_s = chance.uniform(0, 8)
    if chance.random() < _IN_TRAINING:
        while process.poll() is None and not _trains(root):
            time.sleep(0.002)
        wait_s = chance.uniform(0, training_s)
    until = time.monotonic() + wait_s
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    if process.poll() is not None:
        return False
    name, target = chance.choice([("command", process.pid), *_ranks(process.pid)])
    number = signal.SIGTERM if chance.random() < 0.2 else signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, number)
        killed.kills[f"{name} {number.name}"] += 1
    ended = process.wait() == 0
    _wait_until_free(root)
    return not ended


def _trains(root: Path) -> bool:
    """Whether a run is in an iteration."""
    states = [json.loads(path.read_text()) for path in root.glob("*/status.json")]
    return any(each["state"] == "running" and each["current_iteration"] for each in states)


def _ranks(command: int) -> list[tuple[str, int]]:
    """The workers below a command: each `("rank", pid)`."""
    try:
        below = psutil.Process(command).children(recursive=True)
        words = {each.pid: " ".join(each.cmdline()) for each in below}
    except psutil.Error:
        return []
    return [
        ("rank", pid)
        for pid, line in words.items()
        if "quantexp.training.worker" in line and "torch.distributed" not in line
    ]


def _wait_until_free(root: Path) -> None:
    """Wait until no process of the run is left: those of a killed command end a moment later."""
    while any(
        str(root) in " ".join(each.info["cmdline"] or []) and each.pid != os.getpid()
        for each in psutil.process_iter(["cmdline"])
        if "quantexp.training" in " ".join(each.info["cmdline"] or [])
    ):
        time.sleep(0.05)


def differences(undisturbed: Path, killed: Path) -> list[str]:
    """What a run that was killed has not as the undisturbed one, in words; empty if all is equal bit for bit."""
    differing = [
        name
        for name, content in (
            ("metrics", _metrics),
            ("manifest", lambda folder: _lines(folder / "tensors" / "manifest.jsonl")),
            ("statistics", lambda folder: _lines(folder / "tensors" / "statistics.jsonl")),
            ("captured files", _captured),
            ("TensorBoard", _steps),
        )
        if content(undisturbed) != content(killed)
    ]
    return [*differing, *_different_files(undisturbed, killed)]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in _MEASURED} for line in lines]


def _lines(file: Path) -> list[str]:
    """The lines of a list without the time of the run's start; ranks that went on add theirs after those of others."""
    text = file.read_text() if file.exists() else ""
    return sorted(_STAMP.sub("", line) for line in text.splitlines())


def _captured(folder: Path) -> list[str]:
    files = (path for path in (folder / "tensors").rglob("*") if path.is_file())
    return sorted(_STAMP.sub("", str(path.relative_to(folder))) for path in files)


def _steps(folder: Path) -> dict[str, list[int]]:
    if not (folder / "tensorboard").is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _different_files(undisturbed: Path, killed: Path) -> Iterator[str]:
    """Files of the last checkpoint with other bytes."""
    last = max((undisturbed / "checkpoints").iterdir())
    for path in sorted(path for path in last.rglob("*") if path.is_file()):
        name = path.relative_to(undisturbed)
        other = killed / name
        if not other.is_file() or other.read_bytes() != path.read_bytes():
            yield str(name)


def main() -> int:
    """Print a line for each case; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=CASES, help="these cases alone")
    parser.add_argument("--folder", type=Path, help="where the runs stay (default: nowhere)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    sys.stdout.write(
        "| case | kills | of the command | of a rank | SIGTERM | runs | iterations repeated | differs |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    wrong = False
    for name in arguments.only or CASES:
        undisturbed = run(CASES[name], folder / name / "undisturbed")
        killed = kill_and_go_on(
            CASES[name], folder / name / "killed", undisturbed, arguments.kills, arguments.seed
        )
        wrong |= bool(killed.differ)
        differ = "; ".join(sorted(killed.differ)) or "nothing"
        sys.stdout.write(f"| {name} | {_counts(killed)} | {differ} |\n")
        sys.stdout.flush()
    if arguments.folder is None and not wrong:
        shutil.rmtree(folder)
    return int(wrong)


def _counts(killed: Killed) -> str:
    kills = killed.kills
    by_word = [
        sum(n for words, n in kills.items() if word in words)
        for word in ("command", "rank", "SIGTERM")
    ]
    return " | ".join(map(str, (kills.total(), *by_word, killed.ended, killed.lost)))


if __name__ == "__main__":
    sys.exit(main())
