"""A tiny corpus and train.py as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import ROOT

TINY = [
    "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4",
    "--gradient_accumulation_steps=2", "--learning_rate=1e-2", "--min_lr=1e-3",
    "--warmup_iters=5", "--max_iters=50", "--lr_decay_iters=50", "--eval_interval=20",
    "--eval_iters=4", "--compile=False", "--device=cpu", "--dtype=float32",
]  # fmt: skip


def write_corpus(folder: Path, train: int = 20_000, val: int = 2_000, vocab: int = 64) -> Path:
    """A corpus in which a token tells the next but for some noise."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        tokens = (np.arange(count) * 7 + generator.integers(0, 3, count)) % vocab
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"vocab_size": vocab}))
    return folder


def command(*flags: str, processes: int = 0) -> list[str]:
    """The command line of train.py, by torchrun if `processes` are given."""
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*start, str(ROOT / "train.py"), *flags]


def environment() -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def train(*flags: str, processes: int = 0, check: bool = True) -> subprocess.CompletedProcess:
    """Run train.py to its end."""
    arguments = command(*flags, processes=processes)
    result = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(), timeout=300
    )
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    """Training loss by step."""
    return {line["iter"]: line["loss"] for line in metrics(out) if "loss" in line}
