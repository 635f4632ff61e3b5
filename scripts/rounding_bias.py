"""
The paper's mechanism, measured: signed mean error of O and δ on rows whose maximum is repeated.

    python scripts/rounding_bias.py [--rows=20000] [--png=bias.png] [--arithmetics official paper …]

Each row attends to 64 keys: one or more at the maximum r_m, drawn from (1, 40), the others `gap` to
gap + 2 below it. |V| = 2.2 + 0.7·U(0, 1), so P̄V adds numbers of one sign and exponent (section 3.3
of arXiv 2510.04212). dO = U(0, 1): δ gathers the errors of a row of O. The sign of an error follows
the weight of the other keys, not V alone: `gap` is an axis, as are the number of maxima and the
sign of V.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flash_attn_stable import output_and_deltas

KEYS, WIDTH = 64, 16
GAPS, TIES = (6.0, 8.0, 10.0, 12.0, 14.0), (1, 2, 3, 4)
ARITHMETICS = (
    "paper", "paper,stable=paper", "paper,stable=bounded", "paper,row_sum=fp32", "paper,delta=dp_p",
    "fa2",
)  # fmt: skip


def tied_rows(
    rows: int, ties: int, gap: float, seed: int, sign: int = -1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dO [rows / 16, 1, 64, 16] in BF16 whose first 16 queries have the described scores.

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
    v = (sign * (2.2 + 0.7 * uniform(KEYS, WIDTH))).bfloat16()
    q = torch.zeros_like(k)
    q[:, :, :WIDTH] = torch.eye(WIDTH)
    return q, k, v, uniform(KEYS, WIDTH).bfloat16()


def signed_errors(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, precision: str, device: str = "cpu"
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(mean, its standard error) of O − exact O and of δ − exact δ over the rows of `tied_rows`.

    On a GPU the Triton kernels compute them, on a CPU the reference.
    """
    q, k, v, do = (x.to(device) for x in (q, k, v, do))
    o, delta = output_and_deltas(q, k, v, do, False, 1.0, precision)
    exact = torch.softmax(k[:, :, :, :WIDTH].double().mT, -1) @ v.double()
    exact_delta = (exact * do[:, :, :WIDTH].double()).sum(-1)
    return (
        _mean((o[:, :, :WIDTH].double() - exact).mean((1, 2, 3))),
        _mean((delta[:, :, :WIDTH].double() - exact_delta).mean((1, 2))),
    )


def _mean(of_heads: Tensor) -> tuple[float, float]:
    """Of errors, one a head: rows of one head share V."""
    return of_heads.mean().item(), (of_heads.std() / len(of_heads) ** 0.5).item()


def measure(arithmetics: list[str], rows: int, seed: int, device: str) -> dict:
    """(sign of V, gap, maxima, arithmetic) → the two pairs of `signed_errors`."""
    results = {}
    torch.manual_seed(seed)  # of stochastic rounding
    for sign in (-1, 1):
        for gap in GAPS:
            for ties in TIES:
                inputs = tied_rows(rows, ties, gap, seed, sign)
                for text in arithmetics:
                    results[sign, gap, ties, text] = signed_errors(*inputs, text, device)
    return results


def table(results: dict, arithmetics: list[str], sign: int, which: int) -> list[str]:
    """Lines of a Markdown table of the errors of O (which = 0) or δ (1) for one sign of V."""
    lines = ["| others below r_m by | maxima | " + " | ".join(arithmetics) + " |"]
    lines.append("|---" * (2 + len(arithmetics)) + "|")
    for gap in GAPS:
        for ties in TIES:
            cells = [results[sign, gap, ties, text][which] for text in arithmetics]
            cells = " | ".join(f"{mean:+.1e} ± {error:.0e}" for mean, error in cells)
            lines.append(f"| {gap:g} | {ties} | {cells} |")
    return lines


def draw(results: dict, arithmetics: list[str], png: str, device: str):
    """Errors of O and δ against the gap, a panel for each number of maxima."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(TIES), figsize=(14, 7), sharex=True, sharey="row")
    for which, row in enumerate(axes):
        for ties, panel in zip(TIES, row, strict=True):
            for i, text in enumerate(arithmetics):
                for sign, style in ((-1, "o-"), (1, "s:")):
                    points = [results[sign, gap, ties, text][which] for gap in GAPS]
                    means, errors = zip(*points, strict=True)
                    label = text if sign < 0 else None
                    options = dict(color=f"C{i}", markersize=4, linewidth=1.2, label=label)
                    gaps = [gap + 0.07 * i for gap in GAPS]  # beside each other where they agree
                    panel.errorbar(gaps, means, errors, fmt=style, **options)
            panel.axhline(0, color="black", linewidth=0.6)
            panel.grid(alpha=0.3)
            if which == 0:
                panel.set_title(f"{ties} maxim{'um' if ties == 1 else 'a'}")
            else:
                panel.set_xlabel("other keys below the maximum by")
        row[0].set_ylabel(f"mean error of {'O' if which == 0 else 'δ'}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(arithmetics), frameon=False)
    figure.suptitle(f"Signed mean error by repeated maxima ({device}); V < 0 solid, V > 0 dotted")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(png, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000, help=f"{2 * WIDTH} or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arithmetics", nargs="+", default=ARITHMETICS)
    parser.add_argument("--png", default="")
    args = parser.parse_args()
    try:
        if args.rows < 2 * WIDTH:
            raise ValueError(f"--rows must be at least {2 * WIDTH}, got {args.rows}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        results = measure(args.arithmetics, args.rows, args.seed, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"signed mean error ± standard error, {args.rows:,} rows on {device}")
    for which, name in enumerate(("O", "δ")):
        for sign in (-1, 1):
            print(f"\n{name}, V {'<' if sign < 0 else '>'} 0")
            print("\n".join(table(results, args.arithmetics, sign, which)))
    if args.png:
        draw(results, args.arithmetics, args.png, device)
        print(args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
