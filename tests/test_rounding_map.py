"""The grid of runs: what it counts, what it keeps, what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from helpers import TINY, environment, metrics, write_corpus

sys.path.insert(0, str(ROOT / "scripts"))
from rounding_map import errors_of_delta, fisher, read_grid, run_all, table

SCRIPT = ROOT / "scripts" / "rounding_map.py"
GRID = """
base = "configs/fast_cpu.py"
flags = {flags}
arms = {{"original | full": ["--precision=paper"], "control | full": ["--attention=sdpa"]}}
seeds = [0, 1]
compare = [("original | full", "control | full")]
"""


@pytest.mark.parametrize(
    ("counts", "p"), [((5, 5, 0, 5), 2 / 252), ((3, 3, 0, 3), 0.1), ((1, 2, 1, 2), 1.0)]
)
def test_fishers_exact_test(counts, p):
    assert fisher(*counts) == pytest.approx(p)


def run(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)


def test_a_grid_runs_and_is_kept(tmp_path):
    """Every arm with every seed; a second command repeats nothing and does what is left."""
    corpus = write_corpus(tmp_path / "corpus")
    flags = [*TINY, f"--dataset={corpus}", "--max_iters=12", "--gradient_accumulation_steps=1"]
    grid = tmp_path / "tiny.py"
    grid.write_text(GRID.format(flags=flags))
    args = [str(grid), "--jobs=2", f"--out={tmp_path}", f"--summary={tmp_path / 'all.json'}"]
    first = run(*args)
    assert first.returncode == 0, first.stderr
    summary = json.loads((tmp_path / "all.json").read_text())["tiny"]
    arm = summary["arms"]["original | full"]
    assert arm["seeds"] == [0, 1]
    for key in ("explosion_step", "non_finite_step", "rise_step"):
        assert arm[key] == [None, None]
    assert arm["steps"] == [12, 12]
    assert arm["tokens_per_step"] == 4 * 32
    assert arm["arithmetic"] == "paper"
    assert summary["arms"]["control | full"]["arithmetic"] == "sdpa"
    assert "original · full | `paper` | 0 of 2" in table(summary)
    for name in ("map.png", "loss.png"):
        assert (tmp_path / "tiny" / name).stat().st_size > 0

    (tmp_path / "tiny" / "original_full" / "seed1" / "ended.json").unlink()
    second = run(*args)
    assert "4 runs, 3 ended before" in second.stdout
    again = json.loads((tmp_path / "all.json").read_text())["tiny"]["arms"]["original | full"]
    assert again["final_loss"] == arm["final_loss"]

    other = run(*args, "--learning_rate=1e-3")  # would mix two experiments
    assert other.returncode == 2
    assert "holds a run with another learning_rate" in other.stderr


def test_errors_of_delta_are_of_a_trained_model_before_it_fails(tmp_path):
    """Rows of dS that sum to less than zero are a δ that is too large."""
    evaluations = [{"iter": i, "ds_mean": [-0.1 * i, None]} for i in range(0, 2000, 500)]
    lines = [*evaluations, {"event": "rise", "iter": 1500, "detected_iter": 1599}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert errors_of_delta(tmp_path) == [50, 100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms = {}", "base must be a str"),
        ('base = "x"\narms = []', "arms must be a dict"),
        ('base = "x"\narms = {}', "arms must give each name a list"),
        ('base = "x"\narms = {"a": "--x=1"}', "arms must give each name a list"),
        ('base = "x"\narms = {"a>1": [], "a<1": []}', "differ in punctuation alone"),
        ('base = "x"\narms = {"a": []}\ncompare = [("a", "b")]', "unknown"),
        ('base = "x"\narms = {"a": []}\nseed = 1', "unknown"),
        ("arms = {", "SyntaxError"),
    ],
)
def test_bad_grid(text, message, tmp_path):
    path = tmp_path / "grid.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_grid(str(path))


def test_bad_command(tmp_path):
    result = run(str(tmp_path / "none.py"))
    assert result.returncode == 2
    assert result.stderr.startswith("error: no grid file")


def test_a_run_that_fails_is_told(tmp_path):
    grid = tmp_path / "wrong.py"
    flags = [*TINY, f"--dataset={write_corpus(tmp_path / 'corpus')}", "--init_from=resume"]
    grid.write_text(GRID.format(flags=flags))
    result = run(str(grid), f"--out={tmp_path}")
    assert result.returncode == 1
    assert "ckpt.pt" in result.stderr


class NeedsAll:
    """A run that finds memory only where it is alone."""

    running = 0
    arm, seed, ended = "a", 0, None

    def start(self, threads):
        NeedsAll.running += 1
        self.alone = NeedsAll.running == 1
        self.process = SimpleNamespace(poll=lambda: 0)

    def finish(self):
        NeedsAll.running -= 1
        if not self.alone:
            raise RuntimeError("CUDA out of memory")
        return "ended"


@pytest.mark.parametrize("jobs", [2, 3])
def test_a_run_without_memory_waits(jobs, capsys):
    assert run_all([NeedsAll() for _ in range(3)], jobs, lambda: None) == []
    out = capsys.readouterr().out
    assert out.count("ended;") == 3
    assert "1 at a time from here on" in out


def test_a_run_alone_without_memory_fails():
    task = NeedsAll()
    NeedsAll.running = 1  # of somebody else
    assert run_all([task], 1, lambda: None) == ["CUDA out of memory"]
    NeedsAll.running = 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_too(number, tmp_path):
    """Each saves and ends; the same command goes on from there."""
    flags = [*TINY, f"--dataset={write_corpus(tmp_path / 'corpus')}", "--max_iters=100000"]
    grid = tmp_path / "long.py"
    grid.write_text(GRID.format(flags=[*flags, "--log_interval=1"]))
    command = [sys.executable, str(SCRIPT), str(grid), f"--out={tmp_path}", "--jobs=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        folder = tmp_path / "long" / "original_full" / "seed0"
        while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        try:
            assert "interrupted" in process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert (folder / "ckpt.pt").exists()
    assert not (folder / "ended.json").exists()


def test_flags_are_checked_before_any_run(tmp_path):
    grid = tmp_path / "wrong.py"
    grid.write_text(GRID.format(flags=["--learning_rat=1"]))
    result = run(str(grid), f"--out={tmp_path}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: unknown key 'learning_rat'")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--seed=1", "--seed=1: each run has its own"),
        ("--attention=sdpa", "--attention=sdpa: it is what the arms"),
        ("--dataset=nowhere", "nowhere/train.bin does not exist"),
        ("configs/fast_cpu.py", "'configs/fast_cpu.py': a flag is --key=value"),
        ("--out_dir=x", "--out_dir=x: each run has its own"),
        ("--summary=nowhere/x.json", "no such folder"),
        (f"--summary={__file__}", "is not a file of summaries"),
    ],
)
def test_flags_that_would_spoil_a_grid(flag, message, tmp_path):
    grid = tmp_path / "grid.py"
    grid.write_text(GRID.format(flags=TINY))
    result = run(str(grid), f"--out={tmp_path}", flag)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.rglob("seed*"))


def test_reproduce_gets_to_its_grid(tmp_path):
    """The one command, as far as a flag that no run can have."""
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = [
        "bash",
        str(ROOT / "scripts" / "reproduce.sh"),
        str(write_corpus(tmp_path / "corpus")),
    ]
    command = [*script, f"--out={tmp_path}", "--n_head=0"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment() | {"PATH": python}, timeout=300
    )
    assert result.returncode == 2
    assert "n_head" in result.stderr


def test_the_projects_grids_are_valid():
    from config import parse_args

    for path in (ROOT / "configs" / "grids").glob("*.py"):
        grid = read_grid(str(path))
        for flags in grid["arms"].values():
            parse_args([str(ROOT / grid["base"]), *grid["flags"], *flags])
