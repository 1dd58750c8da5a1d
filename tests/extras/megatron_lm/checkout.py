"""Megatron-LM's loop on a CPU: its own script from archives of its source, and a script of ours with the installed one.

`QUANTEXP_MEGATRON_LM` names a folder with archives `megatron-lm-VERSION.tar.xz`. The wheel of Megatron-Core has
megatron.training from 0.17 on, without pretrain_gpt.py; `launch/pretrain_gpt.py` takes its place. Tests of what is not
there are skipped, and the last lines of the output count them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest

from quantexp.formats.torch_internals import TCPStore
from tests.plugins.not_run import PREFIX

#: Releases whose archives are looked for.
RELEASES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0")
#: The installed megatron.training.
INSTALLED = "installed"
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
#: What a run needs on a CPU, and a Llama of two layers with grouped queries.
WORDS = shlex.split("""
--distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-gradient-accumulation-fusion
--no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--no-persist-layer-norm --tokenizer-type NullTokenizer --vocab-size 5119 --mock-data --num-workers 0 --split 100,0,0
--eval-iters 0 --eval-interval 1000 --log-interval 1 --num-layers 2 --hidden-size 128 --ffn-hidden-size 192
--num-attention-heads 4 --group-query-attention --num-query-groups=2 --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --min-lr 1e-4
--lr-decay-style cosine --bf16 --attention-dropout 0 --hidden-dropout 0
""")
SPEC = ["--spec", "quantexp.megatron_lm", "SPEC"]
_LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ")


@dataclass(frozen=True)
class Ended:
    """A run of the script that has ended."""

    code: int
    output: str

    @property
    def curve(self) -> dict[int, tuple[str, str]]:
        """Iteration -> loss and gradient norm, as printed."""
        return {int(i): (loss, norm) for i, loss, norm in _LOSS.findall(self.output)}


def source_of(loop: str, folder: Path) -> Path:
    """The folder of the script of a release, unpacked, or of ours; the test is skipped if there is none."""
    if loop == INSTALLED:
        if find_spec("megatron.training") is None:
            core = version("megatron-core")
            pytest.skip(
                f"{PREFIX}with an installed megatron.training (Megatron-Core {core} has none)"
            )
        return _HERE / "launch"
    of = f"{PREFIX}of the script of Megatron-LM {loop}"
    if loop >= "0.17" and sys.version_info < (3, 12):
        pytest.skip(f"{of} (it needs Python 3.12)")
    archive = Path(os.environ.get("QUANTEXP_MEGATRON_LM", "")) / f"megatron-lm-{loop}.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{of} (QUANTEXP_MEGATRON_LM names no folder with {archive.name})")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / f"megatron-lm-{loop}"
    import megatron.core.datasets as installed

    for helper in Path(str(installed.__path__[0])).glob("helpers_cpp*.so"):
        (source / "megatron" / "core" / "datasets" / helper.name).symlink_to(helper)
    return source


def run_script(
    source: Path,
    folder: Path,
    words: list[str],
    num_ranks: int = 1,
    before: tuple[str, ...] = ("pretrain_gpt.py",),
    without: str = "",
    last: Mapping[str, str] | None = None,
    **variables: str,
) -> Ended:
    """Run pretrain_gpt.py in a folder, with more words than `WORDS` and `without` some of these.

    The last rank alone has the variables `last`. The result has what all ranks printed, that of rank 0 last.
    """
    standard = [word for word in WORDS if word not in without.split()]
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(_HERE / "on_cpu"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks' store is hosted here
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(num_ranks),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    # No pipes: a rank whose output nobody reads yet would wait, and the others for it.
    files = [tempfile.TemporaryFile("w+") for _ in range(num_ranks)]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(_HERE / "on_cpu" / "run.py"),
                str(source),
                *before,
                *standard,
                *words,
            ],
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **((last or {}) if rank == num_ranks - 1 else {}),
            },
            cwd=folder,
            stdout=files[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in reversed(range(num_ranks))
    ]
    try:
        code = max(abs(process.wait(timeout=600)) for process in processes)
    finally:
        for process in processes:
            process.kill()
    return Ended(code, "".join(_content(file) for file in reversed(files)))


def _content(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()
