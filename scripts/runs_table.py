"""
One row for each run, as a Markdown table: losses at chosen steps, speed, events.

    python scripts/runs_table.py OUT_DIR … [--steps=500,1000,2000]
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from diagnostics import read_metrics

AVERAGED = 50  # steps before the named one


def mean_loss(lines: list[dict], step: int) -> str:
    """Mean of the training losses logged in the 50 steps before `step`."""
    losses = [x["loss"] for x in lines if x.get("loss") and step - AVERAGED <= x["iter"] < step]
    reached = max((x["iter"] for x in lines), default=0) >= step
    return f"{statistics.fmean(losses):.3f}" if losses and reached else "–"


def row(out_dir: Path, steps: list[int]) -> str:
    """The run's cells."""
    lines = read_metrics(out_dir / "metrics.jsonl")
    speeds = [x["tokens_per_second"] for x in lines if x.get("tokens_per_second")]
    mfus = [x["mfu"] for x in lines if x.get("mfu")]
    val = [x["val/loss"] or math.nan for x in lines if "val/loss" in x]
    events = [f"{x['event']} at {x['iter']}" for x in lines if "event" in x]
    cells = [out_dir.name, *(mean_loss(lines, step) for step in steps)]
    cells += [f"{val[-1]:.3f}" if val else "–"]
    cells += [f"{statistics.median(speeds):,.0f}" if speeds else "–"]
    cells += [f"{statistics.median(mfus):.1%}" if mfus else "–", ", ".join(events) or "none"]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("out_dirs", type=Path, nargs="+")
    parser.add_argument("--steps", default="500,1000,2000")
    args = parser.parse_args()
    steps = [int(step) for step in args.steps.split(",")]
    titles = ["run", *(f"loss before step {step}" for step in steps), "last val loss"]
    titles += ["tokens/s", "MFU", "events"]
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    try:
        for out_dir in args.out_dirs:
            print(row(out_dir, steps))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
