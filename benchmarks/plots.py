"""Draws the plots of the report with matplotlib: plots.py FOLDER < data of report.plot_data(). Prints what it wrote."""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

# The same data gives the same file.
plt.rcParams.update({"svg.hashsalt": "fsdp2", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def save(figure, name):
    figure.savefig(Path(sys.argv[1]) / name, bbox_inches="tight", metadata={"Date": None})
    print(name)


def draw_bars(bars):
    figure, axes = plt.subplots(figsize=(7, 3))
    sizes = list(next(iter(bars.values())))
    width = 0.8 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        places = [at + (i - (len(bars) - 1) / 2) * width for at in range(len(sizes))]
        heights = [values[size] or 0 for size in sizes]
        drawn = axes.bar(places, heights, width, label=label)
        axes.bar_label(drawn, [f"{height:.2f}" if height else "" for height in heights], fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("step / ideal")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(bars))
    save(figure, "step_over_ideal.svg")


def draw_lines(lines):
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for label, points in lines.items():
        style = ":" if label == "memcpy" else "--" if "reduce" in label else "-"
        axes.plot(*zip(*points), style, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the whole buffer", ylabel="GB/s")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "bandwidth.svg")


data = json.load(sys.stdin)
if data["bars"]:
    draw_bars(data["bars"])
if data["lines"]:
    draw_lines(data["lines"])
