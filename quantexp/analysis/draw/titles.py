"""The two title lines of a figure of one tensor: its name and its origin."""

from __future__ import annotations

from matplotlib.figure import Figure

from quantexp.analysis.measures.counted import CountedTensor, StatisticsOnly
from quantexp.analysis.style import INK
from quantexp.analysis.tensors.largest import largest_words
from quantexp.quant.label import describe_format


def write_titles(
    figure: Figure, counted_tensor: CountedTensor | StatisticsOnly, source: str
) -> None:
    """Name; run, iteration, rank, shape and dtype, with its anomaly."""
    metadata, record = counted_tensor.entry.metadata, counted_tensor.record
    label = counted_tensor.entry.label
    sample = metadata.get("sample")
    words = [source]
    for key, name in (("iteration", "iteration"), ("micro_batch", "micro-batch"), ("rank", "rank")):
        if metadata.get(key) is not None:
            words.append(f"{name} {metadata.get(key)}")
    words.append(f"{record['dtype']} {' x '.join(map(str, record['shape'])) or 'scalar'}")
    if metadata.get("quant_type"):
        words.append(describe_format(str(metadata["quant_type"]), None))
    if isinstance(sample, dict):
        words.append(f"{sample.get('of')} sampled of {' x '.join(map(str, sample['shape']))}")
    if counted_tensor.finding:
        words.append(counted_tensor.finding)
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.25 / height, label, fontsize=13, weight="bold", color=INK, va="center")
    if largest := record.get("largest"):
        about = f"largest: {largest_words(largest[:1])}"
        y = 1 - 0.25 / height
        figure.text(0.985, y, about, fontsize=8, color=INK, ha="right", va="center")
    figure.text(0.02, 1 - 0.47 / height, "    ".join(words), fontsize=8, color=INK, va="center")
