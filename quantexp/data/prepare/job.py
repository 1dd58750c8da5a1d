"""One preparation, from its configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.data.prepare.inputs import Input, find_inputs, inputs_hash
from quantexp.data.prepare.shards import SHARD_BYTES
from quantexp.data.prepare.work import Filters
from quantexp.data.prepared import TokenizerRecord, default_prefix
from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.folders import require_text, user_path
from quantexp.processes.machine import num_cores
from quantexp.schema.dataset import DEFAULT_SPLIT, DatasetConfig, TokenizerKind

#: Incremented whenever the same input and configuration give other bytes.
PREPARE_VERSION = 3


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer's configuration, from which each process loads its own."""

    kind: str
    path: str | None
    eod: str | None
    pattern: str | None

    def load(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            DataError: it cannot be read.
        """
        return load_tokenizer(self.kind, self.path, eod=self.eod, pattern=self.pattern)


@dataclass(frozen=True)
class Job:
    """A preparation: input, filters, tokenizer and destination."""

    prefix: Path
    inputs: list[Input]
    #: The inputs as configured.
    source: list[str]
    filters: Filters
    split: str
    choice: TokenizerChoice
    tokenizer: Tokenizer
    tokenizer_record: TokenizerRecord
    max_rejected: int
    num_workers: int
    #: The hash of everything that determines the result's bytes.
    hash: str


def make_job(dataset: DatasetConfig, inputs: list[Input] | None = None) -> Job:
    """Returns the job of a configuration.

    Args:
        dataset: the configuration.
        inputs: the input files, if they are known; otherwise they are searched.

    Raises:
        DataError: no input, a tokenizer that cannot be read, or a path that is not UTF-8.
    """
    prefix = user_path(dataset.path or default_prefix(dataset.name)).absolute()
    require_text("dataset.path", prefix, DataError)
    inputs = find_inputs(dataset.source) if inputs is None else inputs
    kind = (dataset.tokenizer or TokenizerKind.huggingface).value
    choice = TokenizerChoice(kind, dataset.tokenizer_path, dataset.eod, dataset.tokenizer_pattern)
    tokenizer = choice.load()
    split = dataset.split or DEFAULT_SPLIT
    filters = Filters(
        name=dataset.name,
        bounds=_bounds(split),
        sources=dict(sorted((dataset.prepare.sources or {}).items())),
        min_chars=dataset.prepare.min_chars,
        max_chars=dataset.prepare.max_chars,
        hashes=dataset.prepare.deduplicate,
    )
    record = TokenizerRecord(
        kind=kind,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        fingerprint=tokenizer.fingerprint(),
        file=tokenizer.files[0].name if tokenizer.files else None,
        eod_name=dataset.eod,
        pattern=dataset.tokenizer_pattern,
    )
    source = [dataset.source] if isinstance(dataset.source, str) else list(dataset.source)
    decides = [PREPARE_VERSION, inputs_hash(inputs), asdict(filters), record.fingerprint]
    return Job(
        prefix=prefix,
        inputs=inputs,
        source=source,
        filters=filters,
        split=split,
        choice=choice,
        tokenizer=tokenizer,
        tokenizer_record=record,
        max_rejected=dataset.prepare.max_rejected,
        num_workers=_num_workers(dataset.prepare.num_workers, inputs),
        hash=hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16],
    )


def _bounds(split: str) -> tuple[float, float]:
    """Returns the bounds at which validation and test begin."""
    shares = [float(share) for share in split.split(",")]
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    validation = shares[0] / total
    test = (shares[0] + shares[1]) / total if shares[2] else 1.0
    return (validation if shares[1] or shares[2] else 1.0), test


def _num_workers(configured: int | None, inputs: list[Input]) -> int:
    if configured is not None:
        return configured
    size = sum(item.num_bytes for item in inputs)
    if size and size < SHARD_BYTES:
        return 1
    return num_cores()
