"""Peak memory of `quantexp evaluate` on llama32-1b at its true size, beside the plan and the size of its weights.

    python benchmarks/evaluation_memory.py [--length 512] [--quant linear_mxfp8] [--samples 2]

The weights are random, in bf16, and the text repeats sentences: neither changes what is allocated. Measured is the
peak resident set of the process beyond its imports (`rank_memory`). Takes some minutes and 6 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rank_memory import rank_peaks


def write_weights(folder: Path) -> None:
    """Published weights of llama32-1b with random values."""
    import torch

    from quantexp.config.compose import compose
    from quantexp.model.huggingface.mapping import mapping, published
    from quantexp.model.publish import write_config
    from quantexp.model.safetensors import write_safetensors

    experiment = compose(["model=llama32-1b", "capture=off"], None, {})
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        for name, shape in published(mapping(experiment.model)).items()
    }
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_config(experiment.model, "bfloat16", folder)


def main() -> None:
    """Print one line of Markdown."""
    parser = argparse.ArgumentParser(description="Peak memory of quantexp evaluate.")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--quant", default="linear_mxfp8")
    parser.add_argument("--samples", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_weights(root / "weights")
        lines = [json.dumps({"text": f"Sentence {i} says nothing. " * 200}) for i in range(60)]
        (root / "text.jsonl").write_text("\n".join(lines))
        command = [sys.executable, "-m", "quantexp", "prepare", "dataset=dolma"]
        command += [f"dataset.source={root / 'text.jsonl'}", "dataset.tokenizer=byte"]
        subprocess.run(
            [*command, "dataset.split='10,90,0'"], check=True, cwd=root, stdout=subprocess.DEVNULL
        )
        (prefix,) = (file.with_suffix("") for file in (root / "data").glob("*.bin"))
        words = ["evaluate.only=true", "capture=off", "model=llama32-1b", "analysis.auto=false"]
        words += [f"model.init_from={root / 'weights'}", "dataset=dolma", "dataset.tokenizer=byte"]
        words += [f"dataset.path={prefix}", f"evaluation.samples={arguments.samples}"]
        words += [f"training.seq_length={arguments.length}", f"quant={arguments.quant}"]

        from quantexp.config.compose import compose
        from quantexp.memory.footprint import fullest_rank

        planned = fullest_rank(compose([*words, "dataset.split='10,90,0'"], None, {}))
        peak = rank_peaks([*words, "dataset.split='10,90,0'"], 1)[0]
    weights, activations = planned.parts_gb["weights"], planned.parts_gb["activations"]
    bound = 1.3 * weights + activations
    parts = ", ".join(f"{name} {gb:.2f}" for name, gb in planned.parts_gb.items())
    sys.stdout.write(
        f"T = {arguments.length}, {arguments.quant}: measured {peak:.2f} GB, planned {planned.gb:.2f} ({parts}); "
        f"1.3 x weights + activations {bound:.2f}\n"
    )


if __name__ == "__main__":
    main()
