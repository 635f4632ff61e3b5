"""
How often a checkpoint's attention repeats a row maximum, and where the paper's fix then underflows.

    python scripts/tied_maxima.py OUT_DIR [--flags of train.py …]

Takes the run's config, whether it has the fix or not, and the batch of its checkpoint's step. Of a
row that repeats r_m the fix leaves Σ P̄ ≈ e^(r_m − β r_m), or e^(r_m) if r_m < 0: below 1e-10 the
authors' floor shrinks the row's O, below 2^-126 GPUs take the sum for 0 and O is 0 / 0.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention_reference import score_tiles, tile_maximum
from batches import Batches
from checkpoints import initial_model
from config import parse_args
from precision import Precision

COLUMNS = ("layer", "rows × tiles", "repeated", "largest r_m", "under 1e-10", "underflow")


def census(q, k, precision: Precision) -> tuple:
    """What `COLUMNS` say of one layer's q, k [B, H, T, D]; the fix of `precision` decides."""
    total = repeated = floored = empty = 0
    largest = -math.inf
    for _, _, s_BHTN in score_tiles(q.float(), k.float(), True, q.shape[3] ** -0.5, precision):
        r_m, m = s_BHTN.amax(-1), tile_maximum(s_BHTN, precision)
        exponent = (r_m - m)[r_m != m]
        total += r_m.numel()
        largest = max(largest, r_m.max().item())
        repeated += exponent.numel()
        floored += (exponent < math.log(1e-10)).sum().item()
        empty += (exponent < -126 * math.log(2)).sum().item()
    return total, repeated, round(largest, 2), floored, empty


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: scripts/tied_maxima.py OUT_DIR [--flags of train.py …]", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    try:
        saved = json.loads((out / "config.json").read_text())
        saved |= {"init_from": "resume", "out_dir": str(out)}
        config = parse_args([*(f"--{key}={value}" for key, value in saved.items()), *sys.argv[2:]])
        model, checkpoint = initial_model(config)
        batches = Batches(config, model.config.vocab_size)
        precision = replace(Precision.parse(config.precision), stable="paper")
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"step {checkpoint['iter_num']}, {config.precision}; layers counted from 0")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")

    def counting(layer, attend, q, k, v):
        cells = (layer, *census(q.bfloat16(), k.bfloat16(), precision))
        print("| " + " | ".join(map(str, cells)) + " |")
        return attend(q, k, v)

    for layer, block in enumerate(model.transformer.h):
        block.attn.attend = partial(counting, layer, block.attn.attend)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = next(batches.training(checkpoint["iter_num"])).to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        _, loss = model.to(device)(tokens[:, :-1], tokens[:, 1:])
    print(f"loss {loss.item():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
