"""The pictures of docs/draw.md in this folder, from runs of the built-in sample that it starts itself.

    python docs/gallery/draw.py [FOLDER]

Some minutes on 2 cores. Runs and drawings are left in FOLDER, which is a temporary one by default; a run that is there
already is not run again. The pictures beside this file are scaled down and reduced to 128 colours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
WIDTH = 1100
COLOURS = 128
RUN = [
    "model=llama32-1b",
    "dataset=wikipedia",
    "training=fast",
    "training.micro_batch_size=1",
    "capture.attn_weights=true",
]
#: Each run's words; `ranks` is of two processes, and all of several iterations.
RUNS = {
    "bf16": ["quant=bf16", "capture.control_iter=3"],
    "hifp8": ["quant=FA_linear_hifp8", "capture.control_iter=3"],
    "ranks": ["quant=FA_linear_mxfp8", "capture.control_iter=3", "launcher.num_processes=2"],
}
#: Name of the drawing -> run, or all, and the words of `draw`.
DRAWINGS = {
    "hifp8": ("hifp8", ["--only", "numerics"]),
    "ranks": ("ranks", ["--only", "numerics,attention_maps"]),
    "tensor": (
        "ranks",
        ["--only", "distributions,heatmaps", "layer=1", "module=fc2", "tensor=input"],
    ),
    "all": ("all", ["--only", "quick_analysis,comparisons"]),
}
#: Name of the picture -> drawing, and the file in it (a pattern, of which the first is taken).
PICTURES = {
    "overview": ("all", "quick_analysis.png"),
    "distribution": ("tensor", "distributions/**/*_linear_L1-fc2_forward_pre_*_input.png"),
    "heatmap": ("tensor", "heatmaps/**/*_linear_L1-fc2_forward_pre_*_input.png"),
    "tensors_by_layer": ("ranks", "numerics/**/tensors_by_layer*.png"),
    "numerics_by_layer": ("ranks", "numerics/**/numerics_by_layer*.png"),
    "iterations": ("ranks", "numerics/**/iterations*.png"),
    "overflow": ("ranks", "numerics/**/overflow*.png"),
    "scale_exponents": ("ranks", "numerics/**/scale_exponents*.png"),
    "forward_against_backward": ("ranks", "numerics/**/forward_against_backward*.png"),
    "rows_against_columns": ("ranks", "numerics/**/rows_against_columns*.png"),
    "channels": ("ranks", "numerics/**/channels*.png"),
    "channel_profile": ("ranks", "numerics/**/channel_profile*.png"),
    "heads": ("ranks", "numerics/**/heads*.png"),
    "ranks": ("ranks", "numerics/**/ranks*.png"),
    "hif8_tiers": ("hifp8", "numerics/**/hif8_tiers*.png"),
    "hif8_values": ("hifp8", "numerics/**/hif8_values*.png"),
    "error_by_scheme": ("all", "comparisons/error_by_scheme*.png"),
    "magnitudes_by_scheme": ("all", "comparisons/magnitudes_by_scheme*.png"),
    "difference": ("all", "comparisons/difference_*.png"),
    "attention": ("ranks", "attention_maps/**/L1*.png"),
}


def main() -> None:
    """Run, draw, and reduce the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="keeps runs and drawings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        draw_all(folder)
        for name, (drawing, pattern) in PICTURES.items():
            pictures = sorted((folder / "drawn" / drawing).glob(pattern))
            if not pictures:
                raise SystemExit(f"nothing in {folder / 'drawn' / drawing} is {pattern}")
            reduce(pictures[0], HERE / f"{name}.png")


def draw_all(folder: Path) -> None:
    """Every run, and every drawing of it."""
    runs = {name: run(folder, name, words) for name, words in RUNS.items()}
    drawn = folder / "drawn"
    everything = [str(path) for path in runs.values()]
    for name, (of, words) in DRAWINGS.items():
        sources = everything if of == "all" else [str(runs[of])]
        quantexp(folder, "draw", *sources, f"out={drawn / name}", "--formats", "png", *words)


def run(folder: Path, name: str, words: list[str]) -> Path:
    """One run's folder."""
    root = folder / name
    quantexp(folder, *RUN, *words, f"paths.root={root}")
    (found,) = (path for path in root.iterdir() if (path / "config.yaml").is_file())
    return found


def quantexp(folder: Path, *words: str) -> None:
    """One command, in the folder."""
    subprocess.run([sys.executable, "-m", "quantexp", *words], check=True, cwd=folder)


def reduce(source: Path, target: Path) -> None:
    """A picture of at most the gallery's width, with few colours."""
    with Image.open(source) as picture:
        small = picture.convert("RGB")
        if small.width > WIDTH:
            size = (WIDTH, round(small.height * WIDTH / small.width))
            small = small.resize(size, Image.Resampling.LANCZOS)
        small.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            target, optimize=True
        )


if __name__ == "__main__":
    main()
