"""How long a save holds up the step, beside a copy of the same tensors in memory.

    python benchmarks/saving.py [--turns 15] [WORDS ...]

A model with its optimizer makes one step. Then, by turns, a checkpoint with the training state is saved, of which the
time until training may go on counts, and each of its tensors is copied to a warm buffer of the host (`copy_`). Before
each turn the background is done and everything is on the disk. The first turns of both are left out: they allocate the
memory. The check of the tensors for NaN and Inf, which is part of every save, is timed by itself. All figures are
medians; the ratio of a turn compares neighbours, which share the load of other programs. The step after a save runs
beside the background; how much longer it takes is shown too. Saves with the check and without take turns as well: where
the check has just read a tensor, its hash and its copy to the file find it in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from idle_observer import IdleObserver

#: 17 million parameters: 12 bytes of training state for each.
_WORDS = [
    *("training=fast", "model.num_layers=4", "model.hidden_size=512", "model.ffn_hidden_size=2048"),
    *("model.num_attention_heads=8", "model.num_query_groups=8", "model.head_dim=64"),
    *("training.seq_length=64", "training.micro_batch_size=1", "training.global_batch_size=1"),
    *("training.warmup_iterations=0", "capture=off", "checkpoint.optimizer=true"),
    *("checkpoint.every=1", "checkpoint.keep_last=1"),
]


class _Turns:
    """A saver that takes turns with plain copies after each step."""

    def __init__(self, saver: Any) -> None:
        self.saver = saver
        self.buffers: dict[str, Any] = {}
        #: Seconds: of holding up the step, of copying, of the background, of a step beside it and of one at rest.
        self.held_up: list[float] = []
        #: Of the check for NaN and Inf.
        self.checked: list[float] = []
        #: Of a save until its checkpoint is whole, with that check and without.
        self.whole: dict[bool, list[float]] = {True: [], False: []}
        #: The processor's seconds of these, which other programs move less.
        self.processor: dict[bool, list[float]] = {True: [], False: []}
        self.copied: list[float] = []
        self.background: list[float] = []
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.num_bytes = 0
        self._resumed = 0.0
        self._is_beside = False

    def save(
        self, iteration: int, chunks: Any, state: Callable[[], Any], nonfinite: int, seen: Any
    ) -> None:
        if self._resumed:
            self.steps[self._is_beside].append(time.perf_counter() - self._resumed)
        self.saver.finish()
        saves: list[Callable[[], object]] = [
            lambda: self.held_up.append(
                _seconds(lambda: self.saver.save(iteration, chunks, state, nonfinite, seen))
            ),
            lambda: self.background.append(_seconds(self.saver.finish)),
            lambda: self.copied.append(self._copy(state())),
            lambda: self.checked.append(_seconds(lambda: _check(state()))),
        ]
        order = saves if iteration % 2 else [*saves[2:], *saves[:2]]
        for turn in order:
            turn()
        for is_checked in (True, False) if iteration % 2 else (False, True):
            with _checking(is_checked):
                before = time.process_time()
                self.whole[is_checked].append(
                    _seconds(lambda: self._save_whole(iteration, chunks, state, nonfinite, seen))
                )
                self.processor[is_checked].append(time.process_time() - before)
        self._is_beside = iteration % 4 > 1
        if self._is_beside:
            self.saver.save(iteration, chunks, state, nonfinite, seen)
        self._resumed = time.perf_counter()

    def _save_whole(self, *arguments: Any) -> None:
        self.saver.save(*arguments)
        self.saver.finish()

    def _copy(self, state: Any) -> float:
        import torch

        tensors = dict(state.named_tensors())
        self.num_bytes = sum(x.nbytes for x in tensors.values())
        for name, x in tensors.items():
            if name not in self.buffers:
                self.buffers[name] = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return _seconds(lambda: [self.buffers[name].copy_(x) for name, x in tensors.items()])

    def finish(self) -> None:
        self.saver.finish()


@contextlib.contextmanager
def _checking(is_checked: bool) -> Iterator[None]:
    """Saves inside check their tensors, or not."""
    from quantexp.model import finite

    original = finite.is_finite
    if not is_checked:
        finite.is_finite = lambda x: True
    try:
        yield
    finally:
        finite.is_finite = original


def _check(state: Any) -> None:
    from quantexp.model.finite import is_finite

    assert all(is_finite(x) for _, x in state.named_tensors())


def _seconds(call: Callable[[], object]) -> float:
    """Of a call on the device at rest, until the device is at rest again."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else bool
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def measured(words: list[str], turns: int) -> _Turns:
    """Train with turns after each step, on one process."""
    from quantexp.config.compose import compose
    from quantexp.data.prepared import tokenizer_of
    from quantexp.data.sample import sample_prefix
    from quantexp.folders import cache_dir
    from quantexp.model.layout import Layout
    from quantexp.runs.paths import RunDir
    from quantexp.runs.ranks import Rank
    from quantexp.training.context import RunContext
    from quantexp.training.megatron.data_loader import rank_batches
    from quantexp.training.megatron.session import session
    from quantexp.training.megatron.trainer import train
    from quantexp.training.saver import make_saver

    experiment = compose([*_WORDS, f"training.iterations={turns + 1}", *words])
    dataset = experiment.dataset
    prefixes = {
        sample_prefix(dataset.name, cache_dir(experiment.paths.cache), str(dataset.split)): 1.0
    }
    with (
        tempfile.TemporaryDirectory() as root,
        session(experiment.training, Rank(), 2.0, Layout.of(experiment)) as device,
    ):
        batches = rank_batches(experiment, Rank(), prefixes, tokenizer_of(dataset))
        saver = make_saver(RunContext(RunDir(Path(root)), experiment, Rank()))
        result = _Turns(saver)
        with contextlib.closing(saver):
            train(experiment, batches.train, IdleObserver(), device, saver=result)
    return result


def results(words: list[str], turns: int) -> dict[str, str]:
    """The medians, with their units, and ratios."""
    result = measured(words, turns)
    held_up, copied = (statistics.median(each[1:]) for each in (result.held_up, result.copied))
    ratios = [a / b for a, b in zip(result.held_up[1:], result.copied[1:], strict=True)]
    checked = statistics.median(result.checked[1:])
    saving = [a + b for a, b in zip(result.held_up[1:], result.background[1:], strict=True)]
    shares = [a / b for a, b in zip(result.checked[1:], saving, strict=True)]
    with_ = result.whole[True][1:]
    lines = {
        "machine": platform.processor() or platform.machine(),
        "training state": f"{result.num_bytes / 1e6:.0f} MB",
        "step held up": f"{held_up * 1e3:.1f} ms",
        "first save": f"{result.held_up[0] * 1e3:.1f} ms",
        "copied": f"{copied * 1e3:.1f} ms",
        "ratio": f"{held_up / copied:.2f}",
        "ratio of a turn": f"{statistics.median(ratios):.2f}",
        "background": f"{statistics.median(result.background[1:]) * 1e3:.0f} ms",
        "check for NaN and Inf": f"{checked * 1e3:.1f} ms, {100 * statistics.median(shares):.1f}% of saving",
        "save with the check": f"{statistics.median(with_) * 1e3:.0f} ms",
        "dearer than without": _dearer(result.whole),
        "in processor time": _dearer(result.processor),
    }
    for is_beside, name in ((False, "step at rest"), (True, "step beside the background")):
        if steps := result.steps[is_beside]:
            lines[name] = f"{statistics.median(steps) * 1e3:.0f} ms"
    return lines


def _dearer(seconds: dict[bool, list[float]]) -> str:
    with_, without = (seconds[is_checked][1:] for is_checked in (True, False))
    by_turn = [100 * (a / b - 1) for a, b in zip(with_, without, strict=True)]
    of_medians = 100 * (statistics.median(with_) / statistics.median(without) - 1)
    return f"{statistics.median(by_turn):.1f}% (median of neighbours), {of_medians:.1f}% of medians"


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    lines = results(arguments.words, arguments.turns)
    sys.stdout.write("".join(f"{name:<28}{value}\n" for name, value in lines.items()))


if __name__ == "__main__":
    main()
