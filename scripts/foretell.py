"""
Which statistic of attention tells the runs that will fail from the others, before the loss rises?

    python scripts/foretell.py PATH … [--steps=500,1000,1500]

PATH: folders with runs below them, or tar files of such, trained with --log_attention=True. At each
step, of the runs whose loss has not risen by then: AUC, the chance that the statistic (of the layer
where it is largest) is larger in a run that fails later, one whose loss rises, explodes or is not
finite, than in one that does not. 1 foretells, 0.5 says nothing, 0 foretells the opposite.
"""

import argparse
import math
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from diagnostics import read_metrics


def largest(key: str, of: Callable = lambda x: x) -> Callable:
    """(line, line of the evaluation before) → the largest over layers, what is not finite last."""
    return lambda line, _: max(math.inf if x is None else of(x) for x in line[key])


def drift(line: dict, before: dict) -> float:
    """How much larger the error from row to row is than at the evaluation before."""
    return largest("ds_std")(line, before) / max(largest("ds_std")(before, before), 1e-30)


LOGGED = {"ds_mean", "ds_std", "delta_error", "wq_norm", "max_score", "tied"}
STATISTICS = {
    "error of δ from row to row (ds_std)": largest("ds_std"),
    "its drift": drift,
    "its mean, either sign (ds_mean)": largest("ds_mean", abs),
    "error of δ in common (delta_error)": largest("delta_error"),
    "the same, either sign": largest("delta_error", abs),
    "norm of W_Q (wq_norm)": largest("wq_norm"),
    "largest score (max_score)": largest("max_score"),
    "rows that repeat a maximum (tied)": largest("tied"),
}


def runs_below(path: Path) -> list[list[dict]]:
    """The metrics of each run."""
    if path.is_file():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as tar:
            tar.extractall(folder, filter="data")
            return runs_below(Path(folder))
    if not path.is_dir():
        raise FileNotFoundError(f"no folder or tar file {path}")
    return [read_metrics(found) for found in sorted(path.rglob("metrics.jsonl"))]


def losses(lines: list[dict]) -> tuple:
    """Of each step: what tells a run from others, but not from a repetition to the last bit."""
    return tuple((x["iter"], x["loss"]) for x in lines if "loss" in x)


def failure(lines: list[dict]) -> float:
    """Step of the first event; infinite without one."""
    return min((x["iter"] for x in lines if "event" in x), default=math.inf)


def at(lines: list[dict], step: int) -> tuple[dict, dict] | None:
    """The evaluation at a step and the one before it."""
    found = [x for x in lines if x.keys() >= LOGGED and x["iter"] <= step]
    return (found[-1], found[-2]) if len(found) > 1 and found[-1]["iter"] == step else None


def auc(failing: list[float], others: list[float]) -> float:
    """The chance that one of the first is larger than one of the second; a tie counts half."""
    wins = sum((x > y) + (x == y) / 2 for x in failing for y in others)
    return wins / (len(failing) * len(others))


def standard_error(a: float, failing: int, others: int) -> float:
    """Of an AUC of as many independent runs (Hanley and McNeil 1982)."""
    both = (failing - 1) * (a / (2 - a) - a * a) + (others - 1) * (2 * a * a / (1 + a) - a * a)
    return ((a * (1 - a) + both) / (failing * others)) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--steps", default="500,1000,1500")
    args = parser.parse_args()
    try:
        steps = [int(step) for step in args.steps.split(",")]
        runs = {losses(run): run for path in args.paths for run in runs_below(path)}.values()
    except (ValueError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = {}
    for step in steps:
        known = [(failure(run), at(run, step)) for run in runs]
        known = [(fails, lines) for fails, lines in known if lines and fails > step]
        failing = [lines for fails, lines in known if fails < math.inf]
        others = [lines for fails, lines in known if fails == math.inf]
        if failing and others:
            columns[step] = failing, others
    if not columns:
        print(f"error: no step of {args.steps} has runs with --log_attention that fail later, and "
              f"others, among {len(runs)} runs", file=sys.stderr)  # fmt: skip
        return 1
    titles = [f"step {step}: {len(f)} fail, {len(o)} do not" for step, (f, o) in columns.items()]
    print("| AUC of | " + " | ".join(titles) + " |")
    print("|---" * (1 + len(titles)) + "|")
    for name, statistic in STATISTICS.items():
        cells = []
        for groups in columns.values():
            a = auc(*([statistic(*lines) for lines in group] for group in groups))
            cells.append(f"{a:.2f} ± {standard_error(a, *map(len, groups)):.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
