"""Where everything is: the shipped configuration, the cache, and every file of a run folder, each named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunsRoot:
    """The folder of the run folders, and what several runs share there."""

    root: Path

    @property
    def sweeps(self) -> Path:
        """One JSON file for each sweep: the runs it consists of."""
        return self.root / "sweeps"

    @property
    def snapshots(self) -> Path:
        """The source that runs were started with, each version once, by its hash."""
        return self.root / "snapshots"

    @property
    def submissions(self) -> Path:
        """One folder for each submission to SLURM: script, list of runs, what the jobs printed."""
        return self.root / "submissions"


@dataclass(frozen=True)
class Submission:
    """The files of one submission to SLURM; its name is the jobs' name."""

    root: Path

    @property
    def tasks(self) -> Path:
        """The runs it consists of, in the order of their tasks, and the source they use."""
        return self.root / "tasks.json"

    def pickle(self, job_id: str) -> Path:
        """What submitit gives to the ranks of a job."""
        return self.root / f"{job_id}_submitted.pkl"

    def printed(self, job_id: str, rank: int = 0) -> Path:
        """What a rank printed before it had a log of its own; rank 0's is the job's script's too."""
        return self.root / f"{job_id}_{rank}_log.err"


@dataclass(frozen=True)
class SweepFiles:
    """The files of one sweep in `runs/sweeps/`, each named after its list."""

    listing: Path

    @property
    def log(self) -> Path:
        """What the sweep prints where it goes on in the background."""
        return self.listing.with_suffix(".log")

    @property
    def lock(self) -> Path:
        """Held (flock) by the process that works through the sweep; it ends with that process."""
        return self.listing.with_name(f".{self.listing.stem}.lock")


@dataclass(frozen=True)
class RunDir:
    """The files of one run. What is here at the top is the newest attempt; earlier ones are in `attempts/`."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration: all that a rank reads."""
        return self.root / "config.yaml"

    @property
    def provenance(self) -> Path:
        """Versions, commit, host, command line, identity."""
        return self.root / "provenance.json"

    @property
    def status(self) -> Path:
        """State, reason, times, iteration."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON line an iteration."""
        return self.root / "metrics.jsonl"

    @property
    def precision(self) -> Path:
        """The precision map and the proof of its engagement."""
        return self.root / "precision.json"

    @property
    def tensors(self) -> Path:
        """Captured tensors, unless `capture.dir` puts them elsewhere."""
        return self.root / "tensors"

    @property
    def checkpoints(self) -> Path:
        """A folder for each iteration whose model was saved."""
        return self.root / "checkpoints"

    def exported(self, iteration: int) -> Path:
        """A published model of one iteration, unless `out=` puts it elsewhere."""
        return self.root / "export" / f"hf_iteration_{iteration:08d}"

    @property
    def figures(self) -> Path:
        """Pictures."""
        return self.root / "figures"

    @property
    def report(self) -> Path:
        """The page that shows the run; works offline."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """W&B's own files of a run that it tracks; `wandb sync` sends what is there."""
        return self.root / "wandb"

    @property
    def logs(self) -> Path:
        """What each rank printed."""
        return self.root / "logs"

    def rank_log(self, rank: int) -> Path:
        """What one rank printed."""
        return self.logs / f"rank{rank}.log"

    def library_log(self, rank: int) -> Path:
        """What Megatron, torch and Transformer Engine warned one rank of."""
        return self.logs / f"libraries{rank}.log"

    def rank_record(self, rank: int) -> Path:
        """How one rank of several ended."""
        return self.logs / f"rank{rank}.json"

    def courier_log(self, tracker: str) -> Path:
        """What the process printed that reports to a tracker."""
        return self.logs / f"{tracker}.log"

    def delivery(self, tracker: str) -> Path:
        """What a tracker has been told so far."""
        return self.logs / f"{tracker}.json"

    @property
    def torchrun_log(self) -> Path:
        """What torchrun itself printed, and ranks before they had their own log."""
        return self.logs / "torchrun.log"

    @property
    def rendezvous(self) -> Path:
        """Where torchrun's processes find each other; gone when the run has ended."""
        return self.root / ".rendezvous"

    @property
    def reserve(self) -> Path:
        """Space kept free for the last status on a disk that fills up; gone when a run has ended."""
        return self.root / ".reserve"

    @property
    def attempts(self) -> Path:
        """Earlier attempts at the same run, each whole in a numbered folder."""
        return self.root / "attempts"

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, from 1."""
        earlier = [int(folder.name) for folder in self.attempts.glob("[0-9]*")]
        return max(earlier, default=0) + 1

    @property
    def lock(self) -> Path:
        """Held (flock) by the process that runs here; a crash releases it."""
        return self.root / ".lock"

    @property
    def start(self) -> Path:
        """Which start of which job may write here, where the run was submitted."""
        return self.root / ".start"

    def captured(self, capture_dir: str | None) -> Path:
        """Where this run's tensors are."""
        if capture_dir is None:
            return self.tensors
        return Path(capture_dir).expanduser() / self.root.name
