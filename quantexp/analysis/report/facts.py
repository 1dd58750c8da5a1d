"""The overview of a run: what ran, where, and its outcome; and its origin, provenance.json as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.leaves import leaves
from quantexp.analysis.compare.matched import code_words, last_iteration
from quantexp.analysis.compare.side import Side
from quantexp.analysis.evaluation_table import evaluated_words, task_words
from quantexp.analysis.report.proof import Proof
from quantexp.analysis.tensors.run_record import section
from quantexp.errors import UnreadableError
from quantexp.folders import shell_line
from quantexp.processes.machine import ranges
from quantexp.quant.label import describe_scheme
from quantexp.runs.evaluation import is_evaluation, read_evaluation

Facts = tuple[tuple[str, str], ...]

#: Packages that are listed, if installed.
_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def facts(side: Side, proof: Proof, origin: Origin) -> Facts:
    """Heading -> text, most important first, without headings for missing information."""
    status, speed = side.status, side.speed
    training, identity = section(side.config, "training"), side.identity or {}
    trains = not is_evaluation(side.run)
    rows = {
        "state": side.state + (f": {status.reason}" if status and status.reason else ""),
        "training": _training(side, training) if trains else None,
        "steps left out": _left_out(side),
        **({} if trains else _evaluated(side)),
        "model": side.names.model_label,
        "scheme": describe_scheme(side.scheme, side.names.precision),
        "precision": _precision(side, identity),
        "batch": _batch(training, identity),
        "learning rate": _learning_rate(training) if trains else None,
        "data": _data(side),
        "seed": None if side.seed is None else str(side.seed),
        "proof": f"{'' if proof.proved else 'not proved; '}{proof.words}",
        "numerics": origin.verified_state + origin.reason,
        "speed": None
        if speed.tokens_per_s is None
        else f"{speed.tokens_per_s:,.0f} tokens/s (median without iteration 1; emulation costs time that hardware "
        "would save)",
        "memory": None if speed.memory_gb is None else f"{speed.memory_gb:.1f} GB",
        "captured": _captured(status.capture if status else {}),
        "ran": _ran(side.provenance or {}),
        "versions": _versions(side.provenance or {}),
        "code": None if side.provenance is None else code_words(side),
        "run": side.run.root.name,
    }
    return tuple((key, value) for key, value in rows.items() if value)


def _evaluated(side: Side) -> dict[str, str]:
    """The results of an evaluation without training; empty if there are none."""
    try:
        evaluation = read_evaluation(side.run)
    except UnreadableError as error:
        return {"evaluated": str(error)}
    if evaluation is None:
        return {}
    one = evaluation["scheme"]
    on = {"evaluated": f"{one['tokens']:,} held-out tokens of {one['documents']:,} documents"}
    return on | evaluated_words(one) | task_words(evaluation)


def shared(of_each: Sequence[Facts]) -> Facts:
    """The facts that several runs have in common."""
    if len(of_each) < 2:
        return ()
    others = [dict(one) for one in of_each[1:]]
    return tuple(
        (key, words) for key, words in of_each[0] if all(one.get(key) == words for one in others)
    )


def _training(side: Side, training: Mapping[str, Any]) -> str | None:
    wanted = training.get("iterations")
    of = "" if wanted is None else f" of {wanted}"
    if not side.losses.losses and side.losses.nonfinite:
        return f"iteration {last_iteration(side)}{of}, no finite loss"
    if not side.losses.losses:
        return None if wanted is None else f"no iteration{of}"
    lowest = min(side.losses.losses)
    return f"iteration {last_iteration(side)}{of}, loss {side.last_loss}, lowest {lowest:.4f}"


def _left_out(side: Side) -> str | None:
    """The steps with a value that was not finite, and what that was in the last of them."""
    if not side.left_out:
        return None
    last = max(side.left_out)
    shown = ranges(sorted(side.left_out))
    return f"in iteration{'s' * (len(side.left_out) > 1)} {shown}; in {last}, {side.left_out[last]}"


def _precision(side: Side, identity: Mapping[str, Any]) -> str | None:
    path = identity.get("attention_path")
    words = [side.names.precision, None if path is None else f"{path} attention path"]
    return ", ".join(word for word in words if word) or None


def _batch(training: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    size, length = training.get("global_batch_size"), training.get("seq_length")
    if size is None or length is None:
        return None
    words = f"{size} sequences of {length} tokens"
    if (micro := training.get("micro_batch_size")) is not None:
        words += f", micro-batches of {micro}"
    ranks = identity.get("data_parallel")
    return words + (f", data parallel {ranks}" if isinstance(ranks, int) and ranks > 1 else "")


def _learning_rate(training: Mapping[str, Any]) -> str | None:
    largest, least = training.get("lr"), training.get("min_lr")
    if largest is None:
        return None
    words = f"{largest:g}" if isinstance(largest, int | float) else str(largest)
    if isinstance(least, int | float) and training.get("lr_schedule") not in (None, "constant"):
        words += f" to {least:g}"
    if (schedule := training.get("lr_schedule")) is not None:
        words += f", {schedule}"
    if warmup := training.get("warmup_iterations"):
        words += f", {warmup} iteration{'s' * (warmup != 1)} of warm-up"
    return words


def _data(side: Side) -> str | None:
    name, dataset = side.names.dataset, section(side.config, "dataset")
    tokenizer = dataset.get("tokenizer")
    words = [name, None if tokenizer is None else f"{tokenizer} tokenizer"]
    if side.names.mask_documents:
        words.append("documents masked")
    return ", ".join(word for word in words if word) or None


def _captured(capture: Mapping[str, Any]) -> str | None:
    tensors = capture.get("tensors")
    if not tensors:
        return None
    num_bytes = int(capture.get("num_bytes") or 0)
    return (
        f"{tensors} tensors, {num_bytes / 1e6:,.1f} MB of values"
        if num_bytes
        else f"statistics of {tensors} tensors"
    )


def _ran(provenance: Mapping[str, Any]) -> str | None:
    ran = provenance.get("ran")
    if not isinstance(ran, dict):
        return None
    started = str(ran.get("started") or "")[:19].replace("T", " ")
    return f"on {ran.get('device')} of {ran.get('host')}" + (f", {started} UTC" if started else "")


def _versions(provenance: Mapping[str, Any]) -> str | None:
    packages = provenance.get("packages")
    known = dict(packages) if isinstance(packages, dict) else {}
    versions = {"quantexp": provenance.get("quantexp"), **{n: known.get(n) for n in _PACKAGES}}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or None


#: Maximum shown characters of uncommitted changes.
MAX_DIFF = 20_000


@dataclass(frozen=True)
class Origin:
    """Provenance as rows, with the uncommitted changes and the certificate."""

    rows: tuple[tuple[str, str], ...] = ()
    diff: str = ""
    diff_cut: bool = False
    #: The command, quoted for a shell.
    command: str = ""
    #: State and words of `verified`.
    verified_state: str = "not verified"
    verified: str = "provenance.json says nothing about a verification"
    certificate: Mapping[str, Any] | None = None

    @property
    def reason(self) -> str:
        """The text after the state in a sentence, without a leading repetition of the state."""
        begins = self.verified.startswith(self.verified_state)
        return self.verified.removeprefix(self.verified_state) if begins else f": {self.verified}"


def origin(provenance: Mapping[str, Any] | None) -> Origin:
    """The shown part of provenance.json, without the scheme of the identity, which the precision map shows."""
    if provenance is None:
        return Origin()
    command = provenance.get("command")
    source = provenance.get("source")
    diff = str(source.get("diff") or "") if isinstance(source, dict) else ""
    verified = provenance.get("verified")
    known = verified if isinstance(verified, dict) else {}
    certificate = known.get("certificate")
    return Origin(
        tuple(_rows(provenance)),
        diff[:MAX_DIFF],
        len(diff) > MAX_DIFF,
        shell_line(map(str, command)) if isinstance(command, list) else str(command or ""),
        str(known.get("state") or Origin.verified_state),
        str(known.get("words") or Origin.verified),
        certificate if isinstance(certificate, dict) else None,
    )


def _rows(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = {key: value for key, value in provenance.items() if key not in ("verified", "command")}
    for name, key in (("identity", "scheme"), ("source", "diff")):
        part = shown.get(name)
        if isinstance(part, dict):
            shown[name] = {k: v for k, v in part.items() if k != key}
    return [(key, _text(value)) for key, value in leaves(shown).items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
