"""
What error δ has, without training: by arithmetic, length and spread of scores.

    python scripts/delta_error.py [--arithmetics official,key_tile=16 …] [--lengths 1024 8192 …]
        [--seed=0]

q, k, v and dO are normal, q times the spread. A cell is the relative error that δ has in common
(its slope over the δ that agrees with P and dP, ± standard error over heads), and after the slash
the standard deviation of its error over rows, relative to δ's RMS; both over the later half of the
rows, causal, in percent. On a GPU by the Triton kernels, on a CPU by the reference.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flash_attn_stable import delta_gap
from precision import of_heads

ARITHMETICS = (
    "official,key_tile=16", "official,key_tile=16,row_sum=fp32", "official,key_tile=64",
    "official", "paper", "paper,mantissa_bits=5", "paper,mantissa_bits=2", "fa2",
)  # fmt: skip
SPREADS = (0.3, 1.0, 3.0)
HEADS, WIDTH = 4, 32


def measure(arithmetic: str, length: int, spread: float, seed: int, device: str) -> str:
    """A cell of the table."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(4)]
    draws[0] *= spread
    inputs = (x.bfloat16().to(device) for x in draws)
    gap, delta = delta_gap(*inputs, True, WIDTH**-0.5, arithmetic)
    gap, delta = gap[0, :, length // 2 :].double(), delta[0, :, length // 2 :].double()
    agreeing = delta + gap
    slopes = -(gap * agreeing).sum(1) / agreeing.square().sum(1)
    error = slopes.std().item() / HEADS**0.5
    spread_of_rows = (gap.std() / agreeing.square().mean().sqrt()).item()
    return f"{100 * slopes.mean().item():+.2f} ± {100 * error:.2f} / {100 * spread_of_rows:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--arithmetics", nargs="+", default=ARITHMETICS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 8192])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)  # of stochastic rounding
    try:
        if min(args.lengths) < 2:
            raise ValueError(f"--lengths must be 2 or more, got {min(args.lengths)}")
        for arithmetic in args.arithmetics:
            of_heads(arithmetic, HEADS)
        columns = " | ".join(f"spread {spread:g}" for spread in SPREADS)
        print(f"| arithmetic | length | {columns} |\n|---|---{'|---' * len(SPREADS)}|", flush=True)
        for arithmetic in args.arithmetics:
            for length in args.lengths:
                cells = (measure(arithmetic, length, s, args.seed, device) for s in SPREADS)
                print(f"| `{arithmetic}` | {length:,} | {' | '.join(cells)} |", flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
