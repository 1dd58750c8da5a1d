"""The run folder of a Megatron-LM run: where it is, and what it says that the run was.

    QUANTEXP_DIR, or <--save>/quantexp, or runs/megatron_lm_<scheme>-<time>
    with QUANTEXP_GRADIENT: QUANTEXP_DIR, or runs/megatron_lm_<scheme>_gradient-<time>

A job that Megatron-LM continues from its checkpoint goes on in the folder: lines after the checkpoint are cut back, as
they are computed again. Any other start moves what is there into `attempts/`. The recorded identity is that of
Megatron-LM's loop, with its version, commit and arguments; it has no hash of quantexp's, whose loop did not run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.errors import RunError, UnreadableError
from quantexp.extras.megatron_lm.described import NAME
from quantexp.extras.megatron_lm.schemes import Schemes
from quantexp.launch.attempt import set_aside, write_new
from quantexp.launch.going_on import Continuation, go_on
from quantexp.model.layout import Layout
from quantexp.quant.slots import python_sources
from quantexp.runs.gradients import SUFFIX
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import LOOP, Provenance, add_what_ran, provenance, read_provenance
from quantexp.runs.source_files import git_output
from quantexp.runs.status import read_status, write_json
from quantexp.schema import Experiment
from quantexp.training.log import LOG

#: The run folder.
DIR = "QUANTEXP_DIR"
#: Arguments that decide no number: places, logs, this process.
_IDLE = re.compile(
    r"(save|load|log|tensorboard|wandb|one_logger|timing|exit|profile|error_injection|inprocess|ckpt|dist_ckpt"
    r"|data_cache|eval|tb_|straggler|record_memory|flight_recorder|pytorch_profiler|async_ckpt|logits_save"
    r"|moe_routing_trace|nvtx)(_.*|$)|(rank|local_rank|master_.*|.*_path|te_precision_config_file"
    r"|iteration|start_time|.*_dir|spec|distributed_timeout.*)$"
)


def folder_of(experiment: Experiment, save: str | None, environment: Mapping[str, str]) -> RunDir:
    """The run folder of this start."""
    if named := environment.get(DIR, "").strip():
        return RunDir(Path(named).expanduser().absolute())
    is_gradient = experiment.gradient.only
    if save is not None and not is_gradient:
        return beside(save)
    time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    scheme = re.sub(r"[^\w.-]", "-", str(experiment.quant.name))
    return RunDir(Path("runs").absolute() / f"{NAME}_{scheme}{SUFFIX * is_gradient}-{time}")


def beside(checkpoints: str) -> RunDir:
    """The run folder of a training, where no other is named."""
    return RunDir(Path(checkpoints).absolute() / "quantexp")


def open_folder(
    run: RunDir, experiment: Experiment, content: dict[str, Any], iteration: int
) -> int | None:
    """Take the folder's lock until this process ends, and record this start.

    Args:
        run: the folder.
        experiment: what config.yaml will have.
        content: the identity.
        iteration: that of the checkpoint which Megatron-LM has loaded; 0 without one.

    Returns:
        The iteration from which the attempt in the folder goes on; None for a new attempt.

    Raises:
        RunInUseError: another process runs in it.
        RunError: the folder cannot be written.
    """
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        take_lock(run)
        started = _started_with(experiment, content)
        before = None
        if iteration and _has(run, content):
            before = read_status(run.status)
        if before is not None and before.iteration >= iteration:
            point = go_on(Continuation(iteration, before), experiment, run, started)
            if point.changed:
                changes = ", ".join(point.changed)
                LOG.warning(f"goes on from iteration {iteration} with changes: {changes}")
            return iteration
        set_aside(run, experiment.capture.dir)
        write_new(experiment, run, started)
    except OSError as error:
        raise RunError(
            f"the run folder {run.root} cannot be written: {error.strerror}; set {DIR} to a folder that can"
        ) from error
    return None


def _has(run: RunDir, content: dict[str, Any]) -> bool:
    """Whether the folder has an attempt of the same model and scheme under Megatron-LM's loop."""
    try:
        recorded = read_provenance(run.provenance).get("identity", {})
    except (UnreadableError, FileNotFoundError):
        return False
    ours, theirs = (json.loads(json.dumps(each)) for each in (content, recorded))
    return LOOP in theirs and all(theirs.get(key) == ours[key] for key in ("model", "scheme"))


def _started_with(experiment: Experiment, content: dict[str, Any]) -> Provenance:
    started = provenance(content, [Path(sys.argv[0]).name, *sys.argv[1:]], None)
    if sources := python_sources(experiment.quant):
        started["formats"] = sources
    return started


def identity_of(
    experiment: Experiment, schemes: Schemes, args: Any, version: str, device: str
) -> dict[str, Any]:
    """What decided the numbers: Megatron-LM's loop and arguments, and the scheme."""
    model = plain(dataclasses.asdict(experiment.model))
    training, layout = experiment.training, Layout.of(experiment)
    return {
        LOOP: {"name": "Megatron-LM", "version": version, "commit": _commit()},
        "model": model,
        "data": {"tokens": experiment.dataset.label},
        "scheme": schemes.record(training.last_iteration),
        "training": {
            key: plain(getattr(training, key))
            for key in (
                "seed",
                "seq_length",
                "micro_batch_size",
                "global_batch_size",
                "iterations",
                "precision",
            )
        },
        "arguments": {
            name: plain(value)
            for name, value in sorted(vars(args).items())
            if not _IDLE.match(name)
        },
        "attention_path": training.attention.value,
        "device_class": device,
        "data_parallel": layout.data,
        "layout": plain(dataclasses.asdict(layout)),
    }


def plain(value: Any) -> Any:
    """A value as JSON has it; anything but numbers, texts, lists and mappings as text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _commit() -> str | None:
    """The commit of the checkout that Megatron-LM's loop comes from; None if it comes from none."""
    loop = sys.modules.get("megatron.training")
    if loop is None or loop.__file__ is None:
        return None
    file = Path(loop.__file__)
    if not git_output(
        file.parent, "ls-files", file.name
    ):  # an installed one, perhaps inside of a checkout
        return None
    commit = git_output(file.parent, "rev-parse", "HEAD")
    return commit and commit.strip()


def record_what_ran(run: RunDir, device: str, verified: dict[str, Any], version: str) -> None:
    """Add the machine and its packages to provenance.json; megatron.core is the checkout's, not the installed one."""
    add_what_ran(run.provenance, device, verified)
    recorded: dict[str, Any] = dict(read_provenance(run.provenance))
    for part in (recorded, recorded["ran"]):
        part["packages"]["megatron-core"] = version
    write_json(run.provenance, recorded)


def amax_histories(run: RunDir, iteration: int) -> Path:
    """The amax histories of delayed scales at Megatron-LM's checkpoint of an iteration."""
    return run.root / "amax_histories" / f"{iteration:08d}.json"
