"""Decides whether two runs are a matched pair: equal in everything that determines the numbers except the scheme.

What decides them is recorded as the run's identity (`quantexp.launch.identity`); every key of it outside the scheme
belongs to one of the aspects below, so that no difference goes unsaid. The number of iterations is compared as it was
asked for and as it was reached. Versions of packages and the code are no part of an identity, and can change numbers
all the same. A run whose proof failed did not run its scheme, and is matched with none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.leaves import Difference, differing
from quantexp.analysis.compare.side import Side

DATA_ORDER = "data order"
INITIALISATION = "initialisation"
LENGTH = "length"
TRAINING = "training"
ARITHMETIC = "arithmetic"
CODE = "code"
PROOF = "proof"
UNKNOWN = "unknown"

#: Keys or prefixes of keys of an identity -> the aspect they determine; the longest match counts.
_DECIDES = {
    "data": (DATA_ORDER,),
    "model": (INITIALISATION,),
    "training": (TRAINING,),
    "training.seed": (DATA_ORDER, INITIALISATION),
    "training.seq_length": (DATA_ORDER,),
    "training.global_batch_size": (DATA_ORDER,),
    "training.start": (INITIALISATION,),
    "training.chaos": (INITIALISATION,),
    "training.iterations": (LENGTH,),
    "training.stop_after": (LENGTH,),
    "training.micro_batch_size": (ARITHMETIC,),
    "training.precision": (ARITHMETIC,),
    "training.recompute": (ARITHMETIC,),
    "training.deterministic": (ARITHMETIC,),
    "attention_path": (ARITHMETIC,),
    "device_class": (INITIALISATION, ARITHMETIC),
    "products": (ARITHMETIC,),
    "data_parallel": (ARITHMETIC,),
    "layout": (ARITHMETIC,),
    "numerics": (ARITHMETIC,),
    "packages": (ARITHMETIC,),
    "backend": (ARITHMETIC,),
}
#: Descriptions of different fingerprints.
_FINGERPRINTED = {
    "data.tokens": "other tokens",
    "data.tokenizer": "another tokenizer",
    "model.initial_weights": "other initial weights",
    "training.start.weights": "other weights to start from",
    "training.start.padding": "other padding to start from",
    "training.start.optimizer": "another optimizer state to start from",
}
_FINGERPRINT = re.compile(r"\b(?=[0-9a-f]*[0-9])[0-9a-f]{16,}\b")
_ORDER = (DATA_ORDER, INITIALISATION, LENGTH, TRAINING, ARITHMETIC, CODE, PROOF)


@dataclass(frozen=True)
class Mismatch:
    """One aspect in which a run differs from its baseline, with the differences."""

    aspect: str
    why: str


def mismatches(here: Side, baseline: Side) -> list[Mismatch]:
    """The reasons why two runs are not a matched pair; empty if they are."""
    unknown = [
        f"{side.run.provenance} does not say what the run was started with"
        for side in (baseline, here)
        if side.identity is None
    ]
    if unknown:
        return [Mismatch(UNKNOWN, "; ".join(unknown))]
    whys: dict[str, list[str]] = {}
    for difference in _differences(here, baseline):
        for aspect in decides(difference.key):
            whys.setdefault(aspect, []).append(_words(difference))
    lengths = {"training.iterations", "training.stop_after"}
    if lengths.isdisjoint(d.key for d in _differences(here, baseline)):
        _note_what_was_reached(here, baseline, whys)
    if here.codes != baseline.codes:
        whys[CODE] = [f"{code_words(here)} against {code_words(baseline)}"]
    of_whom = {"": here, " for the baseline": baseline}
    whys[PROOF] = [f"failed{whom}" for whom, side in of_whom.items() if side.proof_failures]
    return [Mismatch(aspect, ", ".join(whys[aspect])) for aspect in _ORDER if whys.get(aspect)]


def why_left_out(
    here: Side, baseline: Side, differences: Sequence[Mismatch], name: str
) -> str | None:
    """Why no mean over seeds uses a pair of runs, in a few words; None for a matched pair that is not void.

    `differences` are the pair's mismatches, and `name` is the scheme of its baseline.
    """
    if not (differences or here.is_void or baseline.is_void):
        return None
    if here.broke_off:
        return here.broke_off
    if here.seed != baseline.seed:
        return f"no usable {name} run of its seed"
    if baseline.broke_off:
        return f"{name} {baseline.broke_off}"
    return ", ".join(mismatch.aspect for mismatch in differences)


def decides(key: str) -> tuple[str, ...]:
    """The aspect that a key of an identity determines."""
    while key not in _DECIDES:
        if "." not in key:
            return (TRAINING,)
        key = key.rpartition(".")[0]
    return _DECIDES[key]


def _differences(here: Side, baseline: Side) -> list[Difference]:
    contents = [_without_scheme(here), _without_scheme(baseline)]
    if not all("backend" in content for content in contents):
        # Of an emulated run and one on hardware it is the one thing to be compared.
        contents = [{k: v for k, v in content.items() if k != "backend"} for content in contents]
    return [
        *differing(*contents),
        *differing({"packages": _packages(here)}, {"packages": _packages(baseline)}),
    ]


def _without_scheme(side: Side) -> dict[str, Any]:
    """The identity without its scheme; that of a perturbed bf16 run also without the perturbation, its only purpose."""
    content = {key: value for key, value in (side.identity or {}).items() if key != "scheme"}
    training = content.get("training")
    if side.is_perturbed and isinstance(training, dict):
        content["training"] = {key: value for key, value in training.items() if key != "chaos"}
    return content


def _packages(side: Side) -> Mapping[str, Any]:
    """The package versions of the execution, or of the submission if the former are not recorded."""
    provenance = side.provenance or {}
    ran = provenance.get("ran")
    packages = ran.get("packages") if isinstance(ran, dict) else provenance.get("packages")
    if not isinstance(packages, dict):
        return {}
    return {key: packages.get(key) for key in ("torch", "megatron-core", "transformer-engine")}


def _note_what_was_reached(here: Side, baseline: Side, reasons: dict[str, list[str]]) -> None:
    reached, other = last_iteration(here), last_iteration(baseline)
    if reached != other:
        reasons.setdefault(LENGTH, []).append(f"iteration {reached} reached against {other}")


def last_iteration(side: Side) -> int:
    """The last iteration with a loss, finite or not; 0 if there is none."""
    return max([*side.losses.iterations, *side.losses.nonfinite], default=0)


def _words(difference: Difference) -> str:
    """The difference in words, with fingerprints shortened to their first digits."""
    here, baseline = (str(value) for value in (difference.here, difference.baseline))
    if not (_FINGERPRINT.search(here) or _FINGERPRINT.search(baseline)):
        return f"{difference.key} {_shown(difference.here)} against {_shown(difference.baseline)}"
    what = _FINGERPRINTED.get(difference.key, f"another {difference.key}")
    return f"{what}: {_shown(difference.here)} against {_shown(difference.baseline)}"


def code_words(side: Side) -> str:
    """`1f2e3d4c`; `1f2e3d4c then 5a6b7c8d` of a run that went on with other code."""
    return _shown(" then ".join(side.codes))


def _shown(value: Any) -> str:
    return "none" if value is None else _FINGERPRINT.sub(lambda match: match[0][:8], str(value))


def in_words(differences: Iterable[Mismatch]) -> str:
    """`data order (training.seed 2 against 1), length (...)`."""
    return "; ".join(f"{mismatch.aspect} ({mismatch.why})" for mismatch in differences)
