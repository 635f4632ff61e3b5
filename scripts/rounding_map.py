"""
Train a grid of runs, several at a time on one machine, and map which of them explode.

    python scripts/rounding_map.py configs/grids/points.py --dataset=<folder> [--jobs=5]
        [--out=out/grids] [--summary=FILE] [any flag of train.py]

A grid is a Python file: `base`, a config; `flags` for all runs; `arms`, name → flags; `seeds`; and
`compare`, pairs of arms for Fisher's exact test. An arm named "a | b" stands in row a and column b
of the map. Runs that ended are kept, interrupted ones go on, and one that finds no memory beside
the others waits until one ends. After every run the folder has summary.json, table.md, map.png and,
of a grid of few arms, loss.png with the curves of the first seed; --summary adds the grid to a file
of several. "δ too large by" is the mean error of δ relative to its RMS, over seeds, layers and the
evaluations from step 500 on until the loss rises.

On a GPU, runs that share it through MPS are faster: `nvidia-cuda-mps-control -d` before.
"""

import argparse
import json
import math
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from plot_runs import draw as draw_losses

from batches import load_tokens
from config import parse_args
from diagnostics import read_metrics

KEYS = {"base": str, "flags": list, "arms": dict, "seeds": list, "compare": list}
LAST = 100  # steps that a final loss is the mean of
FIRST = 500  # step from which on errors of δ count
CURVES = 7  # of arms that one plot of losses can show
TELL_EVERY = 20  # seconds between lines that say how far runs are


@dataclass
class Task:
    """One run: an arm with a seed."""

    arm: str
    seed: int
    command: list[str]  # arguments of train.py
    out: Path
    process: subprocess.Popen | None = None
    started: float = 0.0

    @property
    def ended(self) -> dict | None:
        """What was noted when train.py ended by itself; None while it has not."""
        path = self.out / "ended.json"
        return json.loads(path.read_text()) if path.exists() else None

    def check(self):
        """Check the command, its corpus, and that what its folder holds is of the same config.

        Raises:
            ValueError: a key, value or corpus that does not fit (ConfigError), or another run's
                folder.
        """
        parsed = parse_args(self.command)
        for split in ("train", "val"):
            load_tokens(parsed.data_dir, split, parsed.block_size)
        config = asdict(parsed)
        path = self.out / "config.json"
        there = json.loads(path.read_text()) if path.exists() else config
        differing = [k for k in config if k != "init_from" and config[k] != there.get(k)]
        if differing:
            keys = ", ".join(differing)
            raise ValueError(f"{self.out} holds a run with another {keys}; choose another --out")

    def start(self, threads: int):
        """Start train.py, from its last checkpoint if there is one."""
        self.out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "train.py", *self.command]
        if (self.out / "ckpt.pt").exists():
            command.append("--init_from=resume")
        log = open(self.out / "log.txt", "a")  # noqa: SIM115, the child's
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(threads)}
            | os.environ,  # more than cores wait for each other
        )
        log.close()
        self.started = time.time()

    def finish(self) -> str:
        """Note the end of a run that came to one, and say in a line how it went.

        Raises:
            RuntimeError: train.py failed; a loss that is not finite (exit code 3) is a result.
        """
        code = self.process.returncode
        if code not in (0, 3):
            last = (self.out / "log.txt").read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"{self.arm}, seed {self.seed}: exit code {code}: {''.join(last)}")
        write(self.out / "ended.json", json.dumps({"start": self.started, "end": time.time()}))
        for name in ("ckpt.pt", "ckpt_best.pt"):
            (self.out / name).unlink(missing_ok=True)
        r = result(self.out)
        how = "did not explode"
        if r["non_finite_step"] is not None:
            how = f"not finite at {r['non_finite_step']}"
        elif r["explosion_step"] is not None:
            how = f"exploded at {r['explosion_step']}"
        return f"{self.arm}, seed {self.seed}: {how}, final loss {r['final_loss'] or math.nan:.3f}"


def write(path: Path, text: str):
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def read_grid(path: str) -> dict:
    """The grid of a file.

    Raises:
        ValueError: not a grid.
    """
    if not Path(path).is_file():
        raise ValueError(f"no grid file {path!r}")
    try:
        names = {k: v for k, v in runpy.run_path(path).items() if k[0] != "_"}
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    grid = {"flags": [], "seeds": [0], "compare": []} | names
    for key, kind in KEYS.items():
        if not isinstance(grid.get(key), kind):
            raise ValueError(f"{path}: {key} must be a {kind.__name__}, got {grid.get(key)!r}")
    arms = grid["arms"]
    if not arms or not all(isinstance(own, list) for own in arms.values()):
        raise ValueError(f"{path}: arms must give each name a list of flags, got {arms!r}")
    if len(set(map(slug, arms))) < len(arms):
        raise ValueError(f"{path}: names of arms that differ in punctuation alone: {list(arms)}")
    unknown = {arm for pair in grid["compare"] for arm in pair} - set(grid["arms"])
    if unknown or set(grid) - set(KEYS):
        raise ValueError(f"{path}: unknown {sorted(unknown) or sorted(set(grid) - set(KEYS))}")
    return grid


def result(folder: Path) -> dict:
    """What one run shows, from its metrics."""
    lines = read_metrics(folder / "metrics.jsonl")
    events = {x["event"]: x["iter"] for x in reversed(lines) if "event" in x}  # the first of each
    points = [(x["iter"], x["loss"]) for x in lines if x.get("loss") is not None]
    last = max((step for step, _ in points), default=0)
    final = [loss for step, loss in points if step > last - LAST]
    return {
        "explosion_step": events.get("explosion"),
        "non_finite_step": events.get("non_finite"),
        "rise_step": events.get("rise"),
        "final_loss": statistics.fmean(final) if final else None,
        "steps": last + 1,
    }


def errors_of_delta(folder: Path) -> list[float]:
    """Mean error of δ, relative to its RMS, of each layer and evaluation before the loss rises."""
    lines = read_metrics(folder / "metrics.jsonl")
    end = min((x["iter"] for x in lines if "event" in x), default=math.inf)
    logged = [x["ds_mean"] for x in lines if "ds_mean" in x and FIRST <= x["iter"] < end]
    return [-x for layers in logged for x in layers if x is not None]


def busy_minutes(tasks: list[Task]) -> float:
    """Wall time in which at least one of the runs that ended was running."""
    spans = sorted((t.ended["start"], t.ended["end"]) for t in tasks if t.ended)
    total, until = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 60


def fisher(exploded: int, of: int, other_exploded: int, other_of: int) -> float:
    """Two-sided p of Fisher's exact test that both explode alike."""
    total, both = of + other_of, exploded + other_exploded

    def chance(k: int) -> float:
        return math.comb(of, k) * math.comb(other_of, both - k) / math.comb(total, both)

    observed = chance(exploded) * (1 + 1e-9)
    possible = range(max(0, both - other_of), min(of, both) + 1)
    return sum(p for k in possible if (p := chance(k)) <= observed)


def summarize(grid: dict, tasks: list[Task]) -> dict:
    """What the runs that ended show: for each arm, lists with an element a seed."""
    arms = {}
    for arm in grid["arms"]:
        ended = [t for t in tasks if t.arm == arm and t.ended]
        if not ended:
            continue
        rows = [{"seeds": t.seed} | result(t.out) for t in ended]
        config = json.loads((ended[0].out / "config.json").read_text())
        about = json.loads((ended[0].out / "environment.json").read_text())
        flash = "flash" in config["attention"]
        errors = [x for t in ended for x in errors_of_delta(t.out)]
        arms[arm] = {key: [row[key] for row in rows] for key in rows[0]} | {
            "tokens_per_step": config["batch_size"]
            * config["gradient_accumulation_steps"]
            * config["block_size"],
            "parameters": about["parameters"],
            "arithmetic": config["precision"] if flash else config["attention"],
            "delta_error_mean": statistics.fmean(errors) if errors else None,
            "delta_error_se": statistics.stdev(errors) / len(errors) ** 0.5
            if len(errors) > 1
            else None,
        }
    seeds = {t.seed for t in tasks if t.ended}
    pairs = [pair for pair in grid["compare"] if set(pair) <= set(arms)]
    return {
        "wall_minutes_a_seed": busy_minutes(tasks) / max(1, len(seeds)),
        "arms": arms,
        "fisher_exact_p": {
            f"{first} against {second}, {what}": fisher(*count(arms[first]), *count(arms[second]))
            for first, second in pairs
            for what, count in (("failed", failed_of), ("rose", rose_of))
        },
    }


def failures(arm: dict) -> list[int]:
    """Steps at which runs of an arm exploded or stopped being finite, whichever came first."""
    pairs = zip(arm["explosion_step"], arm["non_finite_step"], strict=True)
    return [min(x for x in pair if x is not None) for pair in pairs if pair != (None, None)]


def failed_of(arm: dict) -> tuple[int, int]:
    """How many of how many seeds."""
    return len(failures(arm)), len(arm["seeds"])


def rose_of(arm: dict) -> tuple[int, int]:
    """The same of runs whose loss rose, by 0.1 for 100 steps, or failed."""
    steps = zip(arm["rise_step"], arm["explosion_step"], arm["non_finite_step"], strict=True)
    return sum(step != (None, None, None) for step in steps), len(arm["seeds"])


def table(summary: dict) -> str:
    """The summary in Markdown."""
    columns = (
        "arm",
        "arithmetic",
        "failed",
        "exploded at",
        "not finite at",
        "rise at",
        "final loss",
        "δ too large by",
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, arm in summary["arms"].items():
        losses = [x for x in arm["final_loss"] if x is not None]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        loss = f"{statistics.fmean(losses):.3f}{spread}" if losses else "–"
        steps = [
            ", ".join("–" if x is None else f"{x:,}" for x in arm[key])
            for key in ("explosion_step", "non_finite_step", "rise_step")
        ]
        count = "{} of {}".format(*failed_of(arm))
        error = "–"
        if arm["delta_error_se"] is not None:
            mean, se = (100 * arm[f"delta_error_{key}"] for key in ("mean", "se"))
            error = f"{mean:+.2g} ± {se:.1g} %"
        cells = [name.replace("|", "·"), f"`{arm['arithmetic']}`", count, *steps, loss, error]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{pair}: p = {p:.2g} (Fisher)" for pair, p in summary["fisher_exact_p"].items()]
    lines.append(f"\nwall minutes a seed, all arms: {summary['wall_minutes_a_seed']:.1f}")
    return "\n".join(lines) + "\n"


def draw(summary: dict, png: Path, title: str):
    """A cell for each arm: how many seeds failed, and when; red is early, yellow a mere rise."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = {name: ([*re.split(r" \| ", name), ""])[:2] for name in summary["arms"]}
    rows, columns = (list(dict.fromkeys(place[i] for place in places.values())) for i in (0, 1))
    size = (2.8 + 2.4 * len(columns), 1.2 + 0.45 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    longest = max(max(arm["steps"]) for arm in summary["arms"].values())
    shades = plt.get_cmap("OrRd_r")
    for name, arm in summary["arms"].items():
        y, x = rows.index(places[name][0]), columns.index(places[name][1])
        steps, rises = failures(arm), [step for step in arm["rise_step"] if step is not None]
        colour, text, (count, of) = "#d9ead3", f"none in {longest:,}", failed_of(arm)
        if steps:
            colour = shades(0.2 + 0.6 * statistics.fmean(steps) / longest)
            text = ", ".join(f"{step:,}" for step in steps)
        elif rises:
            colour, text = "#fff2cc", "rises at " + ", ".join(f"{step:,}" for step in rises)
        axes.add_patch(plt.Rectangle((x, y), 1, 1, color=colour))
        axes.text(x + 0.5, y + 0.35, text, ha="center", va="center", fontsize=7)
        axes.text(x + 0.5, y + 0.75, f"{count} of {of}", ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), title=title)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    axes.tick_params(length=0)
    figure.savefig(png, dpi=130)
    plt.close(figure)


def read_collection(path: Path | None) -> dict:
    """The summaries that a file of several grids holds.

    Raises:
        ValueError: no such folder, or a file of something else.
    """
    if path is None or not path.exists():
        if path and not path.parent.is_dir():
            raise ValueError(f"--summary={path}: no such folder")
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--summary={path} is not a file of summaries: {error}") from None


def publish(grid: dict, tasks: list[Task], out: Path, name: str, collection: Path | None):
    """Write summary, table and map of what has ended."""
    summary = summarize(grid, tasks)
    if not summary["arms"]:
        return
    write(out / "summary.json", json.dumps({name: summary}, indent=1) + "\n")
    write(out / "table.md", table(summary))
    draw(summary, out / "map.png", f"{name}: step of failure")
    first = {t.arm: t.out for t in tasks if t.seed == grid["seeds"][0] and t.ended}
    if 0 < len(first) <= CURVES:
        draw_losses(first, out / "loss.png", f"{name}, seed {grid['seeds'][0]}")
    if collection:
        recipes = read_collection(collection)
        write(collection, json.dumps(recipes | {name: summary}, indent=1) + "\n")


def position(task: Task) -> str:
    """How far a run is."""
    path = task.out / "metrics.jsonl"
    lines = [x for x in read_metrics(path) if x.get("loss")] if path.exists() else []
    where = f"step {lines[-1]['iter']}, loss {lines[-1]['loss']:.3f}" if lines else "starting"
    return f"{task.arm}, seed {task.seed}: {where}"


def run_all(tasks: list[Task], jobs: int, published) -> list[str]:
    """Run what has not ended, `jobs` at a time, fewer if memory ends; what failed, a line each."""
    waiting = [t for t in tasks if not t.ended]
    print(
        f"{len(tasks)} runs, {len(tasks) - len(waiting)} ended before, {jobs} at a time", flush=True
    )
    running, failed, told = [], [], time.time()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start(max(1, (os.cpu_count() or 1) // jobs))
            time.sleep(0.5)
            if time.time() - told > TELL_EVERY:
                told = time.time()
                print("  " + "; ".join(map(position, running)), flush=True)
            crowded = len(running) > 1
            for task in [t for t in running if t.process.poll() is not None]:
                running.remove(task)
                try:
                    left = f"{len(waiting) + len(running)} left"
                    print(f"{task.finish()}; {left}", flush=True)
                except RuntimeError as error:
                    if "out of memory" in str(error) and crowded:
                        jobs = max(1, len(running))
                        waiting.insert(0, task)
                        print(f"out of memory: {jobs} at a time from here on", flush=True)
                        continue
                    failed.append(str(error))
                    print(error, file=sys.stderr)
                published()
    except BaseException:
        started = [task.process for task in running if task.process]
        for process in started:
            process.send_signal(signal.SIGINT)  # each saves and ends
        for process in started:
            process.wait()
        raise
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("grid", help="a file of configs/grids")
    parser.add_argument("--jobs", type=int, default=5, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out/grids"))
    parser.add_argument("--summary", type=Path, help="JSON file of several grids to add this to")
    args, flags = parser.parse_known_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # else the runs would go on alone
        signal.signal(number, signal.default_int_handler)
    try:
        grid = read_grid(args.grid)
        if args.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
        stray = [f for f in flags if not re.match(r"--\w+=", f)]
        if stray:
            raise ValueError(f"{stray[0]!r}: a flag is --key=value")
        set_by_arms = {f.partition("=")[0] for own in grid["arms"].values() for f in own}
        clash = [f for f in flags if f.partition("=")[0] in set_by_arms]
        if clash:
            raise ValueError(f"{clash[0]}: it is what the arms of {args.grid} differ in")
        fixed = [f for f in flags if f.startswith(("--out_dir=", "--seed="))]
        if fixed:
            raise ValueError(
                f"{fixed[0]}: each run has its own; choose --out, or seeds in the grid"
            )
        read_collection(args.summary)
        name = Path(args.grid).stem
        out = args.out.resolve() / name
        tasks = []
        for seed in grid["seeds"]:
            for arm, own in grid["arms"].items():
                folder = out / slug(arm) / f"seed{seed}"
                inside = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
                command = [str(ROOT / grid["base"]), f"--out_dir={inside}", f"--seed={seed}"]
                command += [*grid["flags"], *own, *flags]
                tasks.append(Task(arm, seed, command, folder))
                tasks[-1].check()
        published = partial(publish, grid, tasks, out, name, args.summary)
        failed = run_all(tasks, args.jobs, published)
        published()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    if (out / "table.md").exists():
        print((out / "table.md").read_text())
        print(out / "map.png")
    return 1 if failed else 0


def slug(arm: str) -> str:
    """A folder's name."""
    return re.sub(r"[^\w.=,-]+", "_", arm)


if __name__ == "__main__":
    sys.exit(main())
