"""
Train a small GPT with four attentions on the same batches, and measure the paper's mechanism.

Called by scripts/quickstart.sh; flags are train.py's and hold for all runs (--learning_rate=2e-2).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from rounding_bias import signed_errors, tied_rows
from rounding_map import read_grid, result, slug

from diagnostics import read_metrics

GRID = "configs/grids/quickstart.py"
OUT = ROOT / "out" / "quickstart"


def train(flags: list[str], jobs: int):
    """All runs of the grid, `jobs` at a time, anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    command = [sys.executable, "scripts/rounding_map.py", GRID, f"--jobs={jobs}"]
    command += [f"--out={OUT.parent}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if line.startswith("|"):
                break  # its table comes last; ours follows
            print(line, end="", flush=True)
        process.stdout.read()
        code = process.wait()
    except KeyboardInterrupt:  # the runs have it too, and save
        code = process.wait()
    if code != 0:
        sys.exit(f"{' '.join(command)} ended with exit code {code}")


def results(arms: list[str]) -> list[str]:
    """Final losses and failures, as a table."""
    lines = [f"{'':28}{'train':>8}{'val':>8}   loss explodes"]
    for arm in arms:
        metrics = read_metrics(folder(arm) / "metrics.jsonl")
        val = [x["val/loss"] for x in metrics if x.get("val/loss") is not None][-1]
        of = result(folder(arm))
        end = "no"
        if of["explosion_step"] is not None:
            end = f"at step {of['explosion_step']:,}"
        elif of["non_finite_step"] is not None:
            end = f"not finite at step {of['non_finite_step']:,}"
        elif of["rise_step"] is not None:
            end = f"rises from step {of['rise_step']:,}"
        lines.append(f"{arm:28}{of['final_loss']:8.3f}{val:8.3f}   {end}")
    return lines


def folder(arm: str) -> Path:
    return OUT / slug(arm) / "seed0"


def mechanism(device: str) -> list[str]:
    """Signed mean error of O on rows with repeated maxima, as a table."""
    arithmetics = {"original": "paper", "stabilized": "paper,stable=paper", "fa2": "fa2"}
    lines = [f"{'maxima':>8}" + "".join(f"{name:>24}" for name in arithmetics)]
    for ties in (2, 3, 4):
        inputs = tied_rows(20_000, ties, gap=12.0, seed=0)
        cells = []
        for text in arithmetics.values():
            (mean, error), _ = signed_errors(*inputs, text, device)
            cells.append(f"{mean:+.1e} ± {error:.0e}")
        lines.append(f"{ties:>8}" + "".join(f"{cell:>24}" for cell in cells))
    return lines


def main():
    flags = sys.argv[1:]
    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if on_gpu:
        flags = ["--device=cuda", *flags]
        print(f"on {torch.cuda.get_device_name()}: Triton kernels, BF16; about two minutes")
    else:
        print("no GPU: the same arithmetic in PyTorch, FP32 around it; 3 to 5 minutes on 2 cores")
    began = time.time()
    train(flags, jobs=4 if on_gpu else min(4, os.cpu_count() or 1))

    arms = list(read_grid(str(ROOT / GRID))["arms"])
    config = json.loads((folder(arms[0]) / "config.json").read_text())
    steps, seconds = config["max_iters"], time.time() - began
    print(
        f"\nLoss in nats per byte, last 100 of {steps:,} steps or before an explosion was seen;"
        f"\nO and P̄V have 2 mantissa bits, BF16 has 7 ({seconds:.0f} s):"
    )
    print("\n".join(results(arms)))
    print(
        "\nA format this coarse shows what the size of the error does. BF16's error is smaller, but"
        "\nhas one sign. Signed mean error of O in BF16 on rows with tied maxima, ± standard error"
        "\n(20,000 rows, V < 0, other keys 12 to 14 below the maximum):"
    )
    print("\n".join(mechanism("cuda" if on_gpu else "cpu")))
    print(f"\nLoss curves: {(OUT / 'loss.png').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
