"""
Train a small GPT with three attentions on the same batches, and measure the paper's mechanism.

Called by scripts/quickstart.sh; flags are train.py's and hold for all three runs (--max_iters=800).
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from plot_runs import draw
from rounding_bias import signed_errors, tied_rows

from diagnostics import read_metrics

ARMS = {
    "original": ["--attention=flash", "--precision=paper"],
    "stabilized": ["--attention=flash", "--precision=paper,stable=paper"],
    "control": ["--attention=sdpa"],
}
OUT = ROOT / "out" / "quickstart"


def train_arm(arm: str, flags: list[str]):
    """One run of configs/quickstart.py, its progress shown as it comes."""
    command = [sys.executable, "train.py", "configs/quickstart.py", *ARMS[arm], *flags]
    command.append(f"--out_dir={OUT / arm}")
    shutil.rmtree(OUT / arm, ignore_errors=True)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the run has it too, and saves
        code = process.wait()
    if code != 0:
        sys.exit(f"the {arm} run ended with exit code {code}: {' '.join(command)}")


def losses(arm: str) -> tuple[float, float]:
    """Final training and validation loss, both over the same fixed batches for every arm."""
    metrics = read_metrics(OUT / arm / "metrics.jsonl")
    last = [line for line in metrics if "val/loss" in line][-1]
    return last["train/loss"], last["val/loss"]


def mechanism(device: str) -> list[str]:
    """Signed mean error of O on rows with repeated maxima, as a table."""
    arithmetics = {
        "original": "paper",
        "stabilized": "paper,stable=paper",
        "fa2": "fa2",
    }
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
    if not on_gpu:
        flags = ["--device=cpu", *flags]
    if on_gpu:
        print(f"on {torch.cuda.get_device_name()}: Triton kernels, BF16; about a minute")
    else:
        print("no GPU: the same arithmetic in PyTorch, FP32 around it; about 5 minutes on 2 cores")
    began = time.time()
    for i, arm in enumerate(ARMS, 1):
        print(f"\n[{i}/{len(ARMS)}] {arm}: train.py configs/quickstart.py {' '.join(ARMS[arm])}")
        train_arm(arm, flags)

    steps = json.loads((OUT / "original" / "config.json").read_text())["max_iters"]
    png = OUT / "loss.png"
    draw({arm: OUT / arm for arm in ARMS}, png, "the same batches, three attentions")
    print(f"\nFinal loss after {steps} steps, nats per byte ({time.time() - began:.0f} s):")
    print(f"{'':12}{'train':>8}{'val':>8}")
    for arm in ARMS:
        train_loss, val_loss = losses(arm)
        print(f"{arm:12}{train_loss:8.4f}{val_loss:8.4f}")
    print(
        "\nSigned mean error of O on rows with tied maxima, ± standard error (20,000 rows, V < 0,\n"
        "other keys 12 to 14 below the maximum): the bias that the paper's fix is made against."
    )
    print("\n".join(mechanism("cuda" if on_gpu else "cpu")))
    print(
        "\nAt this size and length the three are expected to learn alike; README, Limits."
        f"\nLoss curves: {png.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
