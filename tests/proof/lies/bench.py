"""Runs a setting with a fault, beside the same run without it, and says what became of both.

A run is a whole one of `quantexp.training.worker`, with its folder, session, observer and proof, in this process; a run
of several processes takes place in processes that serve all of them (`ranks`).

    effect   the first iteration in which a loss, a gradient or a validation loss differs from the honest run, or the
             weights after the last do. Of a run that the proof ended it is taken from the same run with an idle
             observer, which proves nothing.
    caught   the iteration that the EngagementError names
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from idle_observer import IdleObserver

from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.schema import Experiment
from quantexp.training.worker import Worker

from .faults import Fault
from .planting import Planter
from .settings import BASE, SETTINGS, Kind


class Status(StrEnum):
    """What became of a fault."""

    #: An EngagementError in the iteration in which the effect begins.
    NAMED = "named"
    #: An EngagementError in a later one, of the first `LONG`.
    LATE = "late"
    #: The run completed, with an effect.
    PASSED = "passed"
    #: It completed, with the numbers of the honest run.
    NO_EFFECT = "no effect"
    #: An EngagementError, or one in an earlier iteration, without an effect on the numbers.
    NAMED_WITHOUT_EFFECT = "named without effect"
    #: Another error ended the run: nobody is misled, but the proof did not do it.
    CRASHED = "crashed"
    #: The setting has no place for the fault.
    NOT_THERE = "not there"


@dataclass(frozen=True)
class Trace:
    """What a run computed, and how it ended."""

    #: Of each complete iteration: loss, gradient norm, validation loss, digest of the gradients.
    numbers: list[list[Any]]
    weights: str
    #: The class of the error, and its words; empty if there was none.
    error: str = ""
    reason: str = ""
    #: How often the fault acted.
    fired: int = 0
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        """Whether the proof ended it."""
        return self.error == "EngagementError"


@dataclass(frozen=True)
class Outcome:
    """One fault in one setting."""

    fault: str
    setting: str
    status: Status
    #: The first iteration with an effect; None without one.
    effect: int | None
    #: The iteration that the error names.
    caught: int | None
    reason: str
    seconds: float
    fired: int = field(default=0)

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


@cache
def _composed(setting: str) -> Experiment:
    case = SETTINGS[setting]
    words = [*BASE, *case.words, f"launcher.num_processes={case.num_processes}"]
    if case.kind is Kind.EVALUATE:
        words.append(f"training.start_from={_trained().root}@2")
    return compose([*words, f"paths.cache={_cache()}"])


#: Set by tests, which have a cache; without it there is one beside the temporary folders.
CACHE: list[Path] = []


@cache
def _cache() -> Path:
    return CACHE[0] if CACHE else Path(tempfile.gettempdir()) / "quantexp-lies"


@cache
def _root() -> Path:
    import atexit

    root = Path(tempfile.mkdtemp(prefix="lies-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def _trained() -> RunDir:
    """An honest run whose second checkpoint is evaluated."""
    words = [*BASE, "quant=FA_linear_mxfp4", "training.iterations=2", "checkpoint.at_end=true"]
    experiment = compose([*words, f"paths.cache={_cache()}", f"paths.root={_root() / 'trained'}"])
    trace, run = _attempt(experiment, None)
    assert not trace.error, trace.reason
    return run


class _Worker(Worker):
    """Keeps the error that ends the run, and the digest of the weights."""

    def __init__(self, run: RunDir, experiment: Experiment, rank: Rank | None = None) -> None:
        super().__init__(run, experiment, rank)
        self.error: BaseException | None = None

    def _train(self) -> None:
        try:
            super()._train()
        except Exception as error:
            self.error = error
            raise


class KilledError(BaseException):
    """Stands in for a kill: nothing handles it."""


def _attempt(
    experiment: Experiment, planter: Planter | None, *, proved: bool = True
) -> tuple[Trace, RunDir]:
    with open_run(experiment, "cpu", ["lies"]) as (opened, _):
        return work(opened.run, experiment, Rank(), planter, proved=proved), opened.run


def work(
    run: RunDir, experiment: Experiment, rank: Rank, planter: Planter | None, *, proved: bool
) -> Trace:
    """One rank of a run whose folder is open."""
    begin = time.monotonic()
    worker = _Worker(run, experiment, rank)
    digest = _Digest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        idle = None if proved else stack.enter_context(_unproved())
        stack.enter_context(digest.taken())
        if planter is not None:
            stack.enter_context(planter)
        worker.run()
    lines = [] if not run.metrics.exists() else run.metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    if idle is not None:
        records = [asdict(metrics) for metrics in idle]
    numbers: list[list[Any]] = [
        [
            r.get("loss"),
            r.get("grad_norm"),
            r.get("validation_loss"),
            digest.gradients.get(r.get("iteration", 0)),
        ]
        for r in records
    ]
    for name in ("evaluation.json", "gradients.json"):
        if (run.root / name).exists():
            numbers.append([_number(run.root / name), None, None, None])
    error = worker.error
    return Trace(
        numbers,
        digest.value,
        "" if error is None else type(error).__name__,
        "" if error is None else str(error),
        0 if planter is None else planter.fired,
        time.monotonic() - begin,
    )


def _number(file: Path) -> float:
    """A number that stands for the numbers of a file of results."""
    content = json.loads(file.read_text())
    for key in ("seconds", "time", "run", "start", "tokens_per_s"):
        content.pop(key, None)
    text = json.dumps(content, sort_keys=True)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


class _Digest:
    """Digests of this rank's gradients in each iteration, and of its parameters after the last."""

    def __init__(self) -> None:
        self.value = ""
        self.gradients: dict[int, str] = {}

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Digest the run inside."""
        from quantexp.training.megatron import trainer

        module: Any = trainer
        build = module.Stepper

        def built(*args: Any, **kwargs: Any) -> Any:
            stepper: Any = build(*args, **kwargs)
            self.chunks, observer = stepper.chunks, stepper.observer
            report = observer.gradients

            def gradients(iteration: int, scale: float | None) -> None:
                self.gradients[iteration] = _digest_of(self.chunks, "main_grad")
                report(iteration, scale)

            observer.gradients = gradients
            return stepper

        module.Stepper = built
        try:
            yield
        finally:
            module.Stepper = build
            if hasattr(self, "chunks"):
                self.value = _digest_of(self.chunks, "data")
                del self.chunks


def _digest_of(chunks: list[Any], name: str) -> str:
    import torch

    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            x = getattr(parameter, name).detach()
            digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _unproved() -> Iterator[list[Metrics]]:
    """Runs inside have an observer that proves nothing; the metrics of their iterations."""
    from quantexp.training import worker

    seen: list[Metrics] = []

    class Unproved(IdleObserver):
        recorder = None
        last_save_s = staticmethod(lambda: 0.0)

        def __init__(self, *args: Any) -> None:
            pass

        def settle(self) -> Any:
            return lambda: None

        def iteration(self, metrics: Metrics) -> bool:
            seen.append(metrics)
            return True

        def finish(self) -> None:
            pass

        def close(self) -> None:
            pass

    # Evaluations and comparisons of gradients have no observer: their verdict is not required.
    from importlib import import_module

    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    others = [
        import_module(f"quantexp.{name}")
        for name in ("extras.evaluate.evaluator", "training.gradients")
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (worker, "RunObserver", Unproved),
            *((other, "require", lambda verdict: None) for other in others),
        ):
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
        yield seen


def trace(
    setting: str, fault: Fault | None, *, proved: bool = True, iterations: int | None = None
) -> Trace:
    """Run a setting, with a fault or without one, for as many iterations as it has or for more."""
    case, experiment = SETTINGS[setting], copy.deepcopy(_composed(setting))
    experiment.training.iterations = iterations or experiment.training.iterations
    folder = Path(tempfile.mkdtemp(dir=_root()))
    experiment.paths.root = str(folder)
    try:
        if case.kind is Kind.RESUME:
            shutil.copytree(_killed(setting), folder, dirs_exist_ok=True, symlinks=True)
        if case.num_processes > 1:
            from .ranks import trace_of_ranks

            name = None if fault is None else fault.name
            return trace_of_ranks(experiment, name, case.num_processes, proved=proved)
        planter = None if fault is None else Planter(fault)
        return _attempt(experiment, planter, proved=proved)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _killed(setting: str) -> Path:
    """The root of an honest run that was killed after iteration 2."""
    from quantexp.training.observer import RunObserver

    experiment = copy.deepcopy(_composed(setting))
    folder = Path(tempfile.mkdtemp(dir=_root()))
    experiment.paths.root = str(folder)
    owner: Any = RunObserver
    original = owner.iteration

    def iterate(observer: RunObserver, metrics: Metrics) -> bool:
        if metrics.iteration == 3:
            raise KilledError
        return bool(original(observer, metrics))

    owner.iteration = iterate
    try:
        _attempt(experiment, None)
    except KilledError:
        pass
    finally:
        owner.iteration = original
    return folder


@cache
def honest(setting: str) -> Trace:
    """The run without a fault.

    Raises:
        RuntimeError: it fails, or its numbers depend on the proof.
    """
    proved, unproved = trace(setting, None), trace(setting, None, proved=False)
    if proved.error:
        raise RuntimeError(f"the honest run {setting} fails: {proved.error}: {proved.reason}")
    if SETTINGS[setting].kind in (Kind.TRAIN,) and first_difference(proved, unproved) is not None:
        raise RuntimeError(f"the numbers of {setting} depend on its proof: {proved}, {unproved}")
    return proved


def first_difference(a: Trace, b: Trace) -> int | None:
    """The first iteration in which two runs differ, weights last; None if they are equal."""
    for index, (one, other) in enumerate(zip(a.numbers, b.numbers, strict=False)):
        if one != other:
            return index + 1
    if len(a.numbers) != len(b.numbers):
        return min(len(a.numbers), len(b.numbers)) + 1
    return None if a.weights == b.weights else len(a.numbers)


#: Iterations in which a lie that begins after the complete check must be found.
LONG = 48
_ITERATION = re.compile(r"iteration (\d+)")


def outcome(setting: str, fault: Fault, *, with_effect: bool = True) -> Outcome:
    """Plant a fault; without `with_effect` a fault that is caught counts as one with an effect in its iteration."""
    begin = time.monotonic()
    good, bad = honest(setting), trace(setting, fault)
    caught = None
    effect = None if bad.error else first_difference(good, bad)
    if (effect or 0) > 1 and SETTINGS[setting].kind is Kind.TRAIN:
        # Later iterations are checked in parts: a lie in one product is found when its turn comes.
        longer = trace(setting, fault, iterations=LONG)
        if longer.is_caught:
            found = _ITERATION.search(longer.reason)
            caught = int(found[1]) if found else 0
            seconds = time.monotonic() - begin
            return Outcome(
                *(fault.name, setting, Status.LATE, effect, caught),
                *(longer.reason, seconds, longer.fired),
            )
    if bad.is_caught:
        found = _ITERATION.search(bad.reason)
        caught = int(found[1]) if found else 0
        if with_effect and not fault.needs_watch:
            alone = trace(setting, fault, proved=False)
            reference = honest(setting)
            if SETTINGS[setting].kind is Kind.TRAIN:
                effect = first_difference(reference, alone)
            else:
                effect = _effect_elsewhere(setting, alone, caught)
            if fault.is_of_step and effect is not None:
                effect = min(effect, caught)
        else:
            effect = caught
        if effect is None or effect > caught > 0:
            status = Status.NAMED_WITHOUT_EFFECT
        else:
            status = Status.NAMED if caught in (effect, 0) else Status.LATE
    elif bad.error:
        effect, status = None, Status.CRASHED
    else:
        status = Status.PASSED if effect is not None else Status.NO_EFFECT
        if effect is None and not bad.fired:
            status = Status.NOT_THERE
    reason = f"{bad.error}: {bad.reason}" if status is Status.CRASHED else bad.reason
    seconds = time.monotonic() - begin
    return Outcome(fault.name, setting, status, effect, caught, reason, seconds, bad.fired)


def _effect_elsewhere(setting: str, alone: Trace, caught: int) -> int | None:
    """Of a run that goes on, or that does not train: the unproved one has its own iterations alone."""
    plain = _honest_unproved(setting)
    effect = first_difference(plain, alone)
    if effect is None:
        return None
    return effect + 2 if SETTINGS[setting].kind is Kind.RESUME else caught


@cache
def _honest_unproved(setting: str) -> Trace:
    return trace(setting, None, proved=False)
