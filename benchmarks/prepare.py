"""Tokens per second of `quantexp prepare`, beside the method of Megatron-LM's tools/preprocess_data.py.

    python benchmarks/prepare.py [--megabytes 60] [--workers 2] [--rounds 3]

Input and tokenizer are the same for both: JSON lines of the text in this environment's Python files, and a byte-level
BPE of 32,000 tokens trained on a part of it. The baseline is written from that method's description, plainly: a pool of
`--workers` processes; each takes JSON lines, tokenises one at a time with the Hugging Face tokenizer that Megatron
uses (`transformers`; and once more with its core alone, `tokenizers`), and sends back lists of ids; one process adds
them to megatron.core's IndexedDatasetBuilder. Both give the same bytes, which is checked. What is timed: for the
baseline from the start of the pool, everything imported before; for quantexp all of `prepare`, its processes' start
included. Wall time says what a user waits on a machine at rest; processor time (of all processes) what it costs, also
where others work beside.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.data.prepare.inputs import find_inputs
from quantexp.data.prepare.job import make_job
from quantexp.data.prepare.run import prepare
from quantexp.data.prepare.shards import read_shards
from quantexp.data.prepare.work import work
from quantexp.data.tokenizers.load import HuggingFaceTokenizer
from quantexp.schema.dataset import DatasetConfig, PrepareConfig, TokenizerKind

VOCAB_SIZE = 32_000
EOD = "<|endoftext|>"


def texts(num_bytes: int) -> Iterator[str]:
    """Documents of a few kB, up to so many bytes; again from the beginning if there is less text."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files += sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(0).shuffle(files)
    total = 0
    while True:
        for file in files:
            try:
                text = file.read_text()[:20_000]
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                yield text
                total += len(text)
            if total > num_bytes:
                return


def train_tokenizer(path: Path) -> None:
    """A byte-level BPE, as Llama 3's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(10_000_000), trainer)
    tokenizer.save(str(path))


class Encoder:
    """What a process of the baseline does."""

    tokenizer: Any
    eod: int

    def __init__(self, path: str, bare: bool) -> None:
        self.path, self.bare = path, bare

    def initializer(self) -> None:
        """Loads the tokenizer once for each process."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if self.bare:
            from tokenizers import Tokenizer

            Encoder.tokenizer = Tokenizer.from_file(self.path)
            Encoder.eod = Encoder.tokenizer.token_to_id(EOD)
        else:
            from transformers import PreTrainedTokenizerFast

            Encoder.tokenizer = PreTrainedTokenizerFast(tokenizer_file=self.path, eos_token=EOD)  # type: ignore[no-untyped-call]
            Encoder.eod = Encoder.tokenizer.eos_token_id

    def encode(self, line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """The ids of a line's text, its lengths, and how long the line was."""
        text = json.loads(line)["text"]
        encoded = Encoder.tokenizer.encode(text) if self.bare else Encoder.tokenizer(text)
        ids = [*(encoded.ids if self.bare else encoded["input_ids"]), Encoder.eod]
        return {"text": ids}, {"text": [len(ids)]}, len(line)


def timed(do: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it returns, and the seconds it takes: by the clock, and of the processor in all processes."""

    def processor() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        used = [resource.getrusage(who) for who in whose]
        return sum(one.ru_utime + one.ru_stime for one in used)

    start, before = time.perf_counter(), processor()
    result = do()
    return result, time.perf_counter() - start, processor() - before


def baseline(source: Path, tokenizer: Path, prefix: Path, workers: int, bare: bool) -> None:
    """The method."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = Encoder(str(tokenizer), bare)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", DType.optimal_dtype(VOCAB_SIZE))
    fork = multiprocessing.get_context("fork")
    with (
        source.open(encoding="utf-8") as stream,
        fork.Pool(workers, initializer=encoder.initializer) as pool,
    ):
        for ids, lengths, _ in pool.imap(encoder.encode, stream, 32):
            builder.add_document(ids["text"], lengths["text"])
        builder.finalize(f"{prefix}.idx")
        pool.close()
        pool.join()  # or the processes' time is not counted


def own(source: Path, tokenizer: Path, prefix: Path, workers: int) -> int:
    """Prepares; how many tokens."""
    config = DatasetConfig(
        name="python",
        path=str(prefix),
        source=str(source),
        tokenizer=TokenizerKind.huggingface,
        tokenizer_path=str(tokenizer),
        split="1",
        prepare=PrepareConfig(num_workers=workers),
    )
    return sum(prepare(make_job(config), Console(quiet=True)).card.num_tokens)


def share_in_tokenizer(source: Path, tokenizer: Path) -> float:
    """Which part of a worker's time is spent in the tokenizer itself; on the first shards."""
    config = DatasetConfig(
        name="python", source=str(source), tokenizer_path=str(tokenizer), split="1"
    )
    job = make_job(config)
    inside = 0.0

    class Timed(HuggingFaceTokenizer):
        def tokenize_all(self, texts: list[str]) -> Any:
            nonlocal inside
            start = time.perf_counter()
            ids = super().tokenize_all(texts)
            inside += time.perf_counter() - start
            return ids

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    timed = Timed(tokenizer)
    (item,) = find_inputs(str(source))
    first = list(islice(read_shards(item), 3))
    start = time.perf_counter()
    for shard in first:
        work(shard, timed, job.filters)
    return inside / (time.perf_counter() - start)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
        train_tokenizer(tokenizer)
        with source.open("w") as stream:
            for number, text in enumerate(texts(int(arguments.megabytes * 1e6))):
                record = {"id": str(number), "text": text, "source": "python"}
                stream.write(json.dumps(record) + "\n")
        kinds = ("quantexp", "baseline", "baseline, bare")
        rates_of: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        import transformers  # noqa: F401  (imported before the clock starts; the pool is forked)

        for turn in range(arguments.rounds):
            prefix = folder / f"own{turn}"
            call = functools.partial(own, source, tokenizer, prefix, arguments.workers)
            num_tokens, *seconds = timed(call)
            rates_of["quantexp"].append((num_tokens / seconds[0], num_tokens / seconds[1]))
            for kind in kinds[1:]:
                other = folder / "other"
                bare = kind.endswith("bare")
                theirs = functools.partial(
                    baseline, source, tokenizer, other, arguments.workers, bare
                )
                _, *seconds = timed(theirs)
                rates_of[kind].append((num_tokens / seconds[0], num_tokens / seconds[1]))
                same = all(
                    Path(f"{prefix}{end}").read_bytes() == Path(f"{other}{end}").read_bytes()
                    for end in (".bin", ".idx")
                )
                if not same:
                    sys.exit(f"{kind} gives other tokens")
        size = source.stat().st_size / 1e6
        _say(f"{size:.0f} MB of JSON lines, {num_tokens:,} tokens, {arguments.workers} workers")
        for i, what in enumerate(("by the clock", "by processor time")):
            ours = statistics.median(rate[i] for rate in rates_of["quantexp"])
            for kind, rates in rates_of.items():
                median = statistics.median(rate[i] for rate in rates)
                each = ", ".join(f"{rate[i] / 1e3:.0f}" for rate in rates)
                _say(
                    f"{what:18} {kind:15} {median / 1e3:6.0f} k tokens/s ({each}); ours {ours / median:.2f} x"
                )
        _say(f"of a worker's time in the tokenizer: {share_in_tokenizer(source, tokenizer):.0%}")


if __name__ == "__main__":
    main()
