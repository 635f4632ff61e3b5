"""
Time attention, forward and forward + backward, on one GPU: this repository's and its peers.

    python scripts/bench_attention.py [--shape=32,12,1024,64] [--sweep]
        [--arithmetics fa2 official,stable=paper …] [--impls=ours,sdpa_flash …]
        [--authors=PATH] [--rep=200] [--csv=FILE] [--png=FILE]

    ours                            flash_attention with each arithmetic
    sdpa_flash, _cudnn, _efficient  torch's SDPA: FlashAttention-2, cuDNN, memory-efficient
    flex                            FlexAttention, compiled
    authors_eager, _compiled        the authors' published PyTorch code, as it is and compiled

Ours gets q, k, v as views of one [B, T, 3, H, D], as from the model; the peers get what suits them
best, contiguous [B, H, T, D]. The authors' code runs if --authors names a copy of their repository,
at the first shape only, in tiles of 512 and under BF16 autocast as in their training; so does
its backward, as in what torch.compile makes of it.

A forward is that of training: it saves what backward needs. What is timed is the GPU: a call is
captured in a CUDA graph and replayed (called where it can't be), the L2 cache cleared before each.
What the host takes to launch a call, as it does outside of graphs, stands beside it. FLOPs are
counted as FlashAttention does: 4·B·H·T²·D forward, half of it if causal, 3.5 times as many with
backward. The CSV is rewritten, whole, after each shape.
"""

import argparse
import csv
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from diagnostics import commit
from flash_attn_stable import flash_attention
from precision import Precision

COLUMNS = (
    "impl", "arithmetic", "stable", "batch", "heads", "length", "head_dim", "causal", "pass",
    "ms_p20", "ms_median", "ms_p80", "tflops", "gpu", "torch", "triton", "commit",
)  # fmt: skip
ARITHMETICS = (
    "fa2", "official", "official,stable=paper", "paper", "paper,stable=paper",
    "official,delta=dp_p", "official,stable=bounded", "fa2,delta=dp_p",
)  # fmt: skip
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
AUTHORS = ("authors_eager", "authors_compiled")
AUTHORS_TILE = 512  # queries, and keys, of a tile in their training
IMPLS = ("ours", *SDPA, "flex", *AUTHORS)
FWD, FWD_BWD = PASSES = ("fwd", "fwd_bwd")
WARMUP = 25  # ms
ROUNDS = 10
HOST_CALLS = 10


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """B,H,T,D, causal; ArgumentTypeError if it is not that."""
        sizes = [int(x) if x.isdecimal() else 0 for x in text.split(",")]
        if len(sizes) != 4 or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"expected B,H,T,D, four sizes, got {text!r}")
        return cls(*sizes, causal=True)

    def __str__(self) -> str:
        B, H, T, D, causal = self
        return f"B {B}, H {H}, T {T}, D {D}, {'causal' if causal else 'not causal'}"


HEADLINE = Shape(32, 12, 1024, 64, True)
TOKENS = HEADLINE.batch * HEADLINE.length
SWEEP = (
    *(Shape(TOKENS // T, 12, T, 64, True) for T in (512, 2048, 4096, 8192)),
    *(Shape(TOKENS // T, 6, T, 128, True) for T in (1024, 4096)),
    HEADLINE._replace(causal=False),
)


class Result(NamedTuple):
    name: str  # the implementation, and the arithmetic if it is ours
    shape: Shape
    which: str  # of PASSES
    p20: float  # quantiles in ms
    median: float
    p80: float
    host: float  # ms

    @property
    def tflops(self) -> float:
        """TFLOP/s at the median, counted as FlashAttention counts."""
        B, H, T, D, causal = self.shape
        flops = 4 * B * H * T * T * D * (0.5 if causal else 1)
        return flops * (3.5 if self.which == FWD_BWD else 1) / self.median * 1e-9


@lru_cache(2)  # all at the same addresses, which move a time by a percent or two
def make_inputs(shape: Shape, strided: bool, device: str = "cuda") -> list[Tensor]:
    """q, k, v [B, H, T, D]: BF16, normal, requiring gradients."""
    B, H, T, D, _ = shape
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(B, T, 3, H, D, generator=generator, device=device, dtype=torch.bfloat16)
    qkv = (x.transpose(1, 2) for x in qkv.unbind(2))
    return [(x if strided else x.contiguous()).detach().requires_grad_() for x in qkv]


def load_authors(path: Path) -> Callable:
    """(q, k, v, mask, causal, tile of queries, tile of keys) → O, from the authors' repository."""
    os.environ.pop("STABLE", None)  # their switch for the fix, read in each call
    spec = importlib.util.spec_from_file_location("authors_attention", path / "attention.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.FlashAttentionFunction.apply
    except (OSError, ImportError, AttributeError) as error:
        raise ValueError(f"--authors={path}: {error}") from None


def causal_mask(b, h, i_q, i_k):
    return i_q >= i_k


def make_attention(
    name: str, shape: Shape, authors: Callable | None, device: str = "cuda"
) -> tuple[Callable, AbstractContextManager]:
    """(q, k, v) → O, and the context in which to call it and its backward."""
    impl, _, arithmetic = name.partition(" ")
    T, causal = shape.length, shape.causal
    torch.compiler.reset()  # a function compiled for 8 shapes would run the next ones in eager mode
    if impl == "ours":
        return partial(flash_attention, causal=causal, precision=arithmetic), nullcontext()
    if impl in SDPA:
        return partial(scaled_dot_product_attention, is_causal=causal), sdpa_kernel(SDPA[impl])
    if impl == "flex":
        mask = create_block_mask(causal_mask, None, None, T, T, device=device) if causal else None
        attend = torch.compile(flex_attention, dynamic=False)
        return partial(attend, block_mask=mask), nullcontext()

    def attend(q, k, v):
        return authors(q, k, v, None, causal, AUTHORS_TILE, AUTHORS_TILE)

    if impl == "authors_compiled":
        attend = torch.compile(attend)
    return attend, torch.autocast(device, torch.bfloat16)


def prepare(
    name: str, shape: Shape, authors: Callable | None, pool: tuple[int, int]
) -> dict[str, tuple[Callable, float]]:
    """pass → its call, captured, and the ms that the host takes to launch it uncaptured; what does
    not run is told and left out."""
    calls = {}
    try:
        attend, context = make_attention(name, shape, authors)
        qkv = make_inputs(shape, strided=name.startswith("ours "))
        with context:
            do = torch.randn_like(attend(*qkv))
            # o.backward() would also copy ours into q.grad, …: their strides are not the leaves'.
            both = lambda: torch.autograd.grad(attend(*qkv), qkv, do)  # noqa: E731
            for which, call in ((FWD, partial(attend, *qkv)), (FWD_BWD, both)):
                replay = captured(call, pool)
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                calls[which] = replay, (time.perf_counter() - start) / HOST_CALLS * 1e3
                torch.cuda.synchronize()
    except Exception as error:  # each backend refuses in its own way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"{name}, {PASSES[len(calls)]}, {shape}: does not run: {reason}", flush=True)
    return calls


def captured(call: Callable, pool: tuple[int, int]) -> Callable:
    """The replay of a CUDA graph of what the call launches; if it does more than that, the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and allocates what outlives a call
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            call()
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}", flush=True)
        return call

    def replay(_call=call):  # the graph reads what the call holds, but does not keep it
        graph.replay()

    return replay


def bench(names: list[str], shape: Shape, authors: Callable | None, rep: int) -> list[Result]:
    """Both passes of each implementation, timed in turn, ROUNDS times, so that a GPU whose clock
    falls (an H200 at its power limit loses some percent, now and then) is slower for all."""
    from triton.testing import do_bench

    pool = torch.cuda.graph_pool_handle()  # one for all, as the inputs; it goes with its last graph
    prepared = {name: prepare(name, shape, authors, pool) for name in names}
    calls = {(n, which): call for n, of in prepared.items() for which, call in of.items()}
    times = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, (replay, _) in calls.items():
            times[key] += do_bench(replay, warmup=WARMUP, rep=rep / ROUNDS, return_mode="all")
    results = []
    for (name, which), (_, host) in calls.items():
        numbers = torch.tensor(times[name, which]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        results.append(x := Result(name, shape, which, *numbers, host))
        line = f"{x.median:.3f} ms ({x.p20:.3f} to {x.p80:.3f}), {x.tflops:.0f} TFLOP/s"
        print(f"{name}, {which}, {shape}: {line}; host {host:.3f} ms", flush=True)
    return results


def by_name(results: list[Result], shape: Shape) -> dict[str, dict[str, Result]]:
    """name → pass → result, of one shape."""
    found = {}
    for x in results:
        if x.shape == shape:
            found.setdefault(x.name, {})[x.which] = x
    return found


def table(results: list[Result], shape: Shape) -> str:
    """A Markdown table of one shape; TFLOP/s, ratios and the host's time are of both passes."""
    head = (
        "impl | arithmetic | fwd ms | fwd+bwd ms | TFLOP/s | time / sdpa_flash | time / ours fa2 | "
        "host ms"
    )
    lines = [f"| {head} |", "|---" * len(head.split("|")) + "|"]
    found = by_name(results, shape)
    peers = [found.get(peer, {}).get(FWD_BWD) for peer in ("sdpa_flash", "ours fa2")]
    for name, passes in found.items():
        impl, _, arithmetic = name.partition(" ")
        cells = [impl, arithmetic, f"{passes[FWD].median:.3f}"]
        if x := passes.get(FWD_BWD):
            cells += [f"{x.median:.3f}", f"{x.tflops:.0f}"]
            cells += [f"{x.median / peer.median:.2f}" if peer else "–" for peer in peers]
            cells.append(f"{x.host:.3f}")
        else:
            cells += ["–"] * 5
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_times(axes, results: list[Result]):
    """Bars of the first shape's times, from 0 to the slowest but the authors'. A bar that is longer
    is cut, as an arrow before its number says."""
    shape = results[0].shape
    found = by_name(results, shape)
    peers = [x.median for x in results if x.shape == shape and x.name not in AUTHORS]
    end = 1.05 * max(peers or (x.median for x in results if x.shape == shape))
    for shift, which, colour in ((-0.2, FWD, "#56B4E9"), (0.2, FWD_BWD, "#0072B2")):
        bars = {i + shift: x[which].median for i, x in enumerate(found.values()) if which in x}
        axes.barh(list(bars), [min(x, end) for x in bars.values()], 0.4, color=colour, label=which)
        for place, x in bars.items():
            text = f" {x:.3f}" if x <= end else f" → {x:.3f}"
            axes.text(min(x, end), place, text, va="center", fontsize=8)
    axes.set(yticks=range(len(found)), yticklabels=list(found), xlim=(0, 1.15 * end))
    axes.set(xlabel="median time (ms)", title=str(shape))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False)


def draw_lengths(axes, results: list[Result]):
    """TFLOP/s of forward + backward over the length at the headline's heads; peers dashed."""
    curves = {}
    for x in results:
        alike = x.shape._replace(batch=HEADLINE.batch, length=HEADLINE.length) == HEADLINE
        if alike and x.which == FWD_BWD and x.name not in AUTHORS:
            curves.setdefault(x.name, {})[x.shape.length] = x.tflops
    # Okabe and Ito's colours, told apart by any eye; the markers tell those that come twice.
    colours = ["#D55E00", "#0072B2", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    for i, (name, points) in enumerate(curves.items()):
        style = ("-" if name.startswith("ours") else "--") + "os^Dv"[i // len(colours) % 5]
        x, y = zip(*sorted(points.items()), strict=True)
        axes.plot(x, y, style, color=colours[i % len(colours)], label=name)
    axes.set_xscale("log", base=2)
    lengths = sorted({length for points in curves.values() for length in points})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    title = f"H {HEADLINE.heads}, D {HEADLINE.head_dim}, causal, B · T = {TOKENS:,}"
    axes.set(xlabel="length T", ylabel="TFLOP/s, forward + backward", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw(results: list[Result], png: Path, title: str):
    """Write a PNG of the first shape's times and, after a sweep, of TFLOP/s over the length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweep = len({result.shape for result in results}) > 1
    size = (10, 11) if sweep else (8, 6)
    figure, panels = plt.subplots(1 + sweep, figsize=size, squeeze=False, layout="constrained")
    draw_times(panels[0, 0], results)
    if sweep:
        draw_lengths(panels[1, 0], results)
    figure.suptitle(title)
    part = png.with_name(png.name + ".part")
    figure.savefig(part, dpi=150, format="png")
    plt.close(figure)
    os.replace(part, png)


def write_csv(results: list[Result], path: Path, origin: tuple[str, ...]):
    """Write the CSV; `origin` are its last columns, the same in each row."""
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for x in results:
            impl, _, text = x.name.partition(" ")
            arithmetic = ",".join(t for t in text.split(",") if not t.startswith("stable="))
            stable = Precision.parse(text).stable if text else "off"
            numbers = [f"{number:.5g}" for number in (x.p20, x.median, x.p80, x.tflops)]
            writer.writerow([impl, arithmetic, stable, *x.shape, x.which, *numbers, *origin])
    os.replace(part, path)


def choose(args: argparse.Namespace) -> list[str]:
    """The names of what to run.

    Raises:
        ValueError: what the arguments ask for does not exist.
    """
    default = IMPLS if args.authors else [impl for impl in IMPLS if impl not in AUTHORS]
    impls = args.impls.split(",") if args.impls else default
    for impl in impls:
        if impl not in IMPLS:
            raise ValueError(f"unknown implementation {impl!r}; known: {', '.join(IMPLS)}")
        if impl in AUTHORS and not args.authors:
            raise ValueError(f"{impl} needs --authors=PATH, a copy of the authors' repository")
    for text in args.arithmetics:
        Precision.parse(text)
    for path in (args.csv, args.png):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: no such folder")
    if args.rep < 1:
        raise ValueError(f"--rep is a number of ms, 1 or more, not {args.rep}")
    if not torch.cuda.is_available():
        raise ValueError("timing attention needs a CUDA GPU")
    names = ([f"ours {x}" for x in args.arithmetics] if i == "ours" else [i] for i in impls)
    return list(dict.fromkeys(chain(*names)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="other lengths and widths, not causal")
    parser.add_argument("--shape", type=Shape.parse, default=HEADLINE, help="B,H,T,D; causal")
    parser.add_argument("--impls", help=f"comma-separated, of {', '.join(IMPLS)}")
    parser.add_argument("--arithmetics", nargs="+", default=ARITHMETICS)
    parser.add_argument("--authors", type=Path, help="a copy of the authors' repository")
    parser.add_argument("--rep", type=int, default=200, help="ms of repeats for a measurement")
    parser.add_argument("--csv", type=Path, default=Path("attention.csv"))
    parser.add_argument("--png", type=Path, default=Path("attention.png"))
    args = parser.parse_args()
    results = []
    try:
        names = choose(args)
        authors = load_authors(args.authors) if args.authors else None
        import triton

        gpu = torch.cuda.get_device_name()
        origin = gpu, torch.__version__, triton.__version__, commit() or ""
        for shape in (args.shape, *SWEEP) if args.sweep else (args.shape,):
            run = [n for n in names if n not in AUTHORS or shape == args.shape]
            results += bench(run, shape, authors, args.rep)
            print(f"\n{shape}\n\n{table(results, shape)}\n", flush=True)
            if results:
                write_csv(results, args.csv, origin)
        if not results:
            raise ValueError("nothing ran")
        draw(results, args.png, f"Attention on one {gpu}, torch {torch.__version__}")
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.csv}, {args.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
