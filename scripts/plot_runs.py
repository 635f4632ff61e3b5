"""
Draw the training losses of runs, and where they rose or exploded.

    python scripts/plot_runs.py OUT_DIR … [--png=FILE] [--labels=a,b,…]
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from diagnostics import read_metrics

WINDOW = 0.01  # of the longest run's steps: what the exponential average reaches back


def smooth(steps: list[int], losses: list[float], reach: float) -> list[float]:
    """Exponential average that reaches back `reach` steps, however they are spaced."""
    smoothed = [losses[0]]
    for before, step, loss in zip(steps, steps[1:], losses[1:], strict=False):
        share = 1 - math.exp((before - step) / reach)
        smoothed.append((1 - share) * smoothed[-1] + share * loss)
    return smoothed


def draw(runs: dict[str, Path], png: Path, title: str = ""):
    """Write a PNG of the losses over steps: faint as logged, strong smoothed. A line marks an
    explosion, a cross the end of a run whose loss was no longer finite.

    Args:
        runs: label → out_dir.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Okabe and Ito's colours, told apart by any eye; the styles tell curves that coincide.
    colours = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    styles = ["-", "--", ":", "-."]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    metrics = {label: read_metrics(out_dir / "metrics.jsonl") for label, out_dir in runs.items()}
    steps = [line["iter"] for lines in metrics.values() for line in lines]
    reach = max(1, WINDOW * max(steps, default=0))
    for i, (label, lines) in enumerate(metrics.items()):
        points = [(x["iter"], x["loss"]) for x in lines if x.get("loss") is not None]
        if not points:
            continue
        steps, losses = zip(*points, strict=True)
        smoothed = smooth(steps, losses, reach)
        colour = colours[i % len(colours)]
        axes.plot(steps, losses, color=colour, alpha=0.2, linewidth=1)
        style = styles[i % len(styles)]
        axes.plot(steps, smoothed, color=colour, linestyle=style, linewidth=2, label=label)
        for event in lines:
            if event.get("event") == "explosion":
                axes.axvline(event["iter"], color=colour, linewidth=1)
            elif event.get("event") == "non_finite":
                axes.plot(event["iter"], smoothed[-1], "X", color=colour, markersize=12)
    axes.set(xlabel="step", ylabel="training loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(png, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("out_dirs", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, default=Path("loss.png"))
    parser.add_argument("--labels", help="one for each run, comma-separated; default: folder names")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    labels = args.labels.split(",") if args.labels else [path.name for path in args.out_dirs]
    if len(labels) != len(args.out_dirs) or len(set(labels)) < len(labels):
        parser.error(f"{len(args.out_dirs)} runs need as many different --labels, got {labels}")
    try:
        draw(dict(zip(labels, args.out_dirs, strict=True)), args.png, args.title)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
