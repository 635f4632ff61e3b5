"""
The paper's mechanism, measured: signed mean error of O on rows whose maximum is repeated.

    python scripts/rounding_bias.py [--rows=20000] [--seed=0] [--arithmetics=official,paper …]

Each row attends to 64 keys: one or more at the maximum r_m, drawn from (1, 40), the others `gap` to
gap + 2 below it. V = −2.2 − 0.7·U(0, 1), so P̄V adds numbers of one sign and exponent (section 3.3
of arXiv 2510.04212). The sign of the error follows the weight of the other keys, not V alone.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention_reference import Precision, reference_forward
from flash_attn_stable import triton_forward

KEYS, WIDTH = 64, 16
GAPS, TIES = (6.0, 8.0, 10.0, 12.0), (1, 2, 3, 4)
ARITHMETICS = ("paper", "paper,stable=paper", "paper,row_sum=fp32", "fa2")


def tied_rows(rows: int, ties: int, gap: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [rows / 16, 1, 64, 16] in BF16 whose first 16 queries have the described scores.

    Query i is the unit vector i, so its score with key j is K[j, i], exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = rows // WIDTH
    uniform = lambda *shape: torch.rand(heads, 1, *shape, generator=generator)  # noqa: E731
    r_m = (1 + 39 * uniform(1, WIDTH)).bfloat16().float()
    k = (r_m - gap - 2 * uniform(KEYS, WIDTH)).bfloat16()
    k[:, :, :ties] = r_m.bfloat16()
    place = uniform(KEYS).argsort(-1)[..., None].expand_as(k)  # the maxima anywhere in the row
    k = k.gather(2, place)
    v = (-2.2 - 0.7 * uniform(KEYS, WIDTH)).bfloat16()
    q = torch.zeros_like(k)
    q[:, :, :WIDTH] = torch.eye(WIDTH)
    return q, k, v


def signed_error(
    q: Tensor, k: Tensor, v: Tensor, precision: Precision, device: str = "cpu"
) -> tuple[float, float]:
    """Mean of O − exact O over the rows of `tied_rows`, and its standard error.

    On a GPU the Triton kernel computes O, on a CPU the reference.
    """
    q, k, v = (x.to(device) for x in (q, k, v))
    forward = triton_forward if q.is_cuda else reference_forward
    o = forward(q, k, v, False, 1.0, precision)[0][:, :, :WIDTH].double()
    exact = torch.softmax(k.double().mT, -1) @ v.double()
    of_heads = (o - exact).mean((1, 2, 3))  # rows of one head share V
    return of_heads.mean().item(), (of_heads.std() / len(of_heads) ** 0.5).item()


def table(arithmetics: list[str], rows: int, seed: int, device: str) -> list[str]:
    """Lines of a Markdown table, one for each gap and number of maxima."""
    lines = ["| others below r_m by | maxima | " + " | ".join(arithmetics) + " |"]
    lines.append("|---" * (2 + len(arithmetics)) + "|")
    for gap in GAPS:
        for ties in TIES:
            inputs = tied_rows(rows, ties, gap, seed)
            cells = [signed_error(*inputs, Precision.parse(a), device) for a in arithmetics]
            cells = " | ".join(f"{mean:+.1e} ± {error:.0e}" for mean, error in cells)
            lines.append(f"| {gap:g} | {ties} | {cells} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arithmetics", nargs="+", default=ARITHMETICS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"signed mean error of O ± standard error, {args.rows:,} rows × {WIDTH} on {device}")
    print("\n".join(table(args.arithmetics, args.rows, args.seed, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
