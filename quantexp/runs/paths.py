"""The paths of every file of a run, a sweep and a submission; no other module builds them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quantexp.folders import user_path


@dataclass(frozen=True)
class RunsRoot:
    """The folder that holds the run folders, and the files that several runs share."""

    root: Path

    @property
    def sweeps(self) -> Path:
        """One JSON file for each sweep with its list of runs."""
        return self.root / "sweeps"

    @property
    def snapshots(self) -> Path:
        """This user's source snapshots, one folder for each hash."""
        return _own(self.root / "snapshots")

    @property
    def submissions(self) -> Path:
        """One folder for each of this user's submissions to SLURM: script, list of runs, output of the jobs."""
        return _own(self.root / SUBMISSIONS)


#: The name of the folder of submissions; that of a further user of a shared folder begins with it.
SUBMISSIONS = "submissions"


def _own(folder: Path) -> Path:
    """A private folder of this user: `NAME`, or `NAME-UID` where that is another user's."""
    try:
        is_own = folder.stat().st_uid == os.getuid()
    except OSError:
        return folder
    return folder if is_own else folder.with_name(f"{folder.name}-{os.getuid()}")


@dataclass(frozen=True)
class Submission:
    """The files of one submission to SLURM; the folder has the jobs' name."""

    root: Path

    @property
    def tasks(self) -> Path:
        """The runs of the submission in the order of their tasks, and their source snapshot."""
        return self.root / "tasks.json"

    @property
    def script(self) -> Path:
        """The script that was submitted."""
        return self.root / "submission.sh"

    @property
    def chain(self) -> Path:
        """The ids of the jobs of a chain, of which each goes on with the runs of the one before."""
        return self.root / "chain.json"

    @property
    def plan(self) -> Path:
        """The division of work beside training into tasks."""
        return self.root / "plan.json"

    @property
    def work(self) -> Path:
        """The work beside training that is divided."""
        return self.root / "work.json"

    @property
    def join_script(self) -> Path:
        """The script of the last job, which joins the partial results of the tasks."""
        return self.root / "join.sh"

    def printed(self, job_id: str) -> Path:
        """The output of a job's script, and of rank 0 before it opened its own log."""
        return self.root / f"{job_id}_0_log.err"


@dataclass(frozen=True)
class SweepFiles:
    """The files of one sweep in `runs/sweeps/`, named after its list."""

    listing: Path

    @property
    def log(self) -> Path:
        """The output of a sweep that runs in the background."""
        return self.listing.with_suffix(".log")

    @property
    def lock(self) -> Path:
        """Locked (flock) by the process that executes the sweep, until that process ends."""
        return self.listing.with_name(f".{self.listing.stem}.lock")


@dataclass(frozen=True)
class RunDir:
    """The files of one run. The top level holds the newest attempt, `attempts/` the earlier ones."""

    root: Path

    def without_folder(self, error: Exception) -> str:
        """The words of an error about a file of this run, for a table that shows the run's name beside them."""
        return str(error).replace(f"{self.root}/", "")

    @property
    def config(self) -> Path:
        """The resolved configuration, the only input of a rank."""
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
    def curves(self) -> Path:
        """One JSON line for each captured iteration with the statistics for trackers."""
        return self.root / "curves.jsonl"

    @property
    def evaluation(self) -> Path:
        """The results of an evaluation without training."""
        return self.root / "evaluation.json"

    @property
    def documents(self) -> Path:
        """Its sums over the tokens of each held-out document."""
        return self.root / "documents.jsonl"

    @property
    def task_documents(self) -> Path:
        """What each document of its tasks counts."""
        return self.root / "tasks.jsonl"

    @property
    def gradients(self) -> Path:
        """The gradients of one iteration under parts of the scheme, compared with those in bf16."""
        return self.root / "gradients.json"

    @property
    def precision(self) -> Path:
        """The precision map and the proof of its engagement."""
        return self.root / "precision.json"

    @property
    def tensors(self) -> Path:
        """Captured tensors, unless `capture.dir` is set."""
        return self.root / "tensors"

    @property
    def dossiers(self) -> Path:
        """One folder for each moment at which something went wrong, or that was asked for."""
        return self.root / "dossiers"

    @property
    def capture_request(self) -> Path:
        """A request for a dossier of the running run; deleted when it is served."""
        return self.root / ".capture"

    @property
    def checkpoints(self) -> Path:
        """One folder for each saved iteration."""
        return self.root / "checkpoints"

    def exported(self, iteration: int) -> Path:
        """The exported Hugging Face model of one iteration, unless `out=` is set."""
        return self.root / "export" / f"hf_iteration_{iteration:08d}"

    @property
    def figures(self) -> Path:
        """Figures."""
        return self.root / "figures"

    @property
    def report(self) -> Path:
        """The report of the run, an HTML page that works offline."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """W&B's own files of a tracked run; `wandb sync` uploads them."""
        return self.root / "wandb"

    @property
    def logs(self) -> Path:
        """The logs of ranks, libraries and torchrun."""
        return self.root / "logs"

    def rank_log(self, rank: int) -> Path:
        """The output of one rank."""
        return self.logs / f"rank{rank}.log"

    def library_log(self, rank: int) -> Path:
        """Warnings of Megatron, torch, Transformer Engine and MLflow in one rank."""
        return self.logs / f"libraries{rank}.log"

    def rank_record(self, rank: int) -> Path:
        """State and reason of one rank's end, in a run of several ranks."""
        return self.logs / f"rank{rank}.json"

    @property
    def torchrun_log(self) -> Path:
        """The output of torchrun, and of ranks before they open their own log."""
        return self.logs / "torchrun.log"

    @property
    def rendezvous(self) -> Path:
        """The rendezvous file of torchrun and its ranks; deleted when the run ends."""
        return self.root / ".rendezvous"

    @property
    def reserve(self) -> Path:
        """Reserved space for the last status on a full disk; deleted when the run ends."""
        return self.root / ".reserve"

    @property
    def kill(self) -> Path:
        """Why the run's worker is killed; written by the process that kills it."""
        return self.root / ".kill"

    @property
    def attempts(self) -> Path:
        """Earlier attempts of the run, each complete in a numbered folder."""
        return self.root / "attempts"

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, from 1."""
        return max(self.attempt_numbers(), default=0) + 1

    def attempt_numbers(self) -> list[int]:
        """The numbers of the earlier attempts."""
        return [int(path.name) for path in self.attempts.glob("[0-9]*") if path.name.isdecimal()]

    @property
    def lock(self) -> Path:
        """Locked (flock) by the process that executes the run; a crash releases the lock."""
        return self.root / ".lock"

    @property
    def claim(self) -> Path:
        """Who starts or executes the run, for machines that do not see each other's locks."""
        return self.root / ".claim"

    @property
    def start(self) -> Path:
        """The fencing token: the name of the start that may write here."""
        return self.root / ".start"

    def captured(self, capture_dir: str | None) -> Path:
        """The folder of this run's captured tensors."""
        if capture_dir is None:
            return self.tensors
        return user_path(capture_dir) / self.root.name
