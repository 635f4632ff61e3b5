"""
Time physical tiles of the three kernels on this GPU, beside those that attention_tiles.py chooses.

    python scripts/tune_tiles.py [--arithmetics fa2 official …] [--head_dim=64] [--length=1024]
        [--jobs=N] [--json=FILE]

Compiles every candidate on all cores, then times them one by one: a minute or two. The tiles in
attention_tiles.py came from a sweep like it on an H200; a table for another GPU starts here.
"""

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention_tiles import arithmetics, dkdv_tiles, dq_tiles, forward_tiles, shared_memory
from flash_attn_backward import _dkdv_kernel, _dq_kernel
from flash_attn_stable import _forward_kernel, triton_forward
from precision import Precision

BATCH, HEADS = 32, 12
KERNELS = {"forward": _forward_kernel, "dq": _dq_kernel, "dkdv": _dkdv_kernel}


@dataclass(frozen=True)
class Candidate:
    """One compilation of one kernel."""

    kernel: str
    arithmetic: str
    head_dim: int
    length: int
    tile: tuple[tuple[str, int], ...]  # of BM, BN, BN_max and held
    options: tuple[tuple[str, int], ...]  # num_warps, num_stages, maxnreg
    chosen: bool = False  # by attention_tiles.py


def compiled(arithmetic: str, length: int, head_dim: int):
    """What is fixed but for the tiles."""
    scale = head_dim**-0.5
    return arithmetics(arithmetic, HEADS, length, head_dim, True, scale, torch.bfloat16)


def candidates(arithmetic: str, length: int, head_dim: int) -> Iterator[Candidate]:
    """The choice of attention_tiles.py for each kernel, then the alternatives to it."""
    A, shared = compiled(arithmetic, length, head_dim), shared_memory(torch.device("cuda"))
    choices = {
        "forward": forward_tiles(A, length, shared),
        "dq": dq_tiles(A, shared),
        "dkdv": dkdv_tiles(A, shared),
    }
    for kernel, (tiled, options) in choices.items():
        C = tiled.of[0]
        tile = dict(BM=C.BM, BN=C.BN, BN_max=C.BN_max, held=C.held)
        seen = set()
        for changed in [(tile, options), *alternatives(kernel, tile)]:
            key = tuple(tuple(sorted(part.items())) for part in changed)
            if key not in seen:
                yield Candidate(kernel, arithmetic, head_dim, length, *key, chosen=not seen)
                seen.add(key)


def alternatives(kernel: str, tile: dict) -> Iterator[tuple[dict, dict]]:
    """Tiles and launch options worth a try. A logical tile that is read once keeps its keys."""
    rows = {"forward": (64, 128), "dq": (64, 128), "dkdv": (32, 64)}[kernel]
    once = kernel == "forward" and not tile["BN_max"]
    keys = (tile["BN"],) if once else (32, 64, 128) if kernel == "dkdv" else (32, 64)
    stages_registers_held = (2, 3, 4), (None, 168, 128), (False, True)
    for BM, BN, stages, registers, held in itertools.product(rows, keys, *stages_registers_held):
        warps = 8 if max(BM, BN) == 128 else 4
        options = dict(num_warps=warps, num_stages=stages)
        if registers:
            options["maxnreg"] = registers
        yield tile | dict(BM=BM, BN=BN, held=held), options


@cache
def tensors(length: int, head_dim: int) -> dict:
    """Inputs and outputs of all kernels, in the layouts of training."""
    qkv = torch.randn(BATCH, length, 3, HEADS, head_dim, device="cuda").bfloat16()
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    do, dq, dk, dv = (
        torch.randn(BATCH, length, HEADS, head_dim, device="cuda").bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    o, lse = triton_forward(q, k, v, True, head_dim**-0.5, "official")
    return dict(
        q=q, k=k, v=v, do=do, o=o, lse=lse, delta=torch.empty_like(lse), dq=dq, dk=dk, dv=dv
    )


def call(candidate: Candidate, compile_only: bool = False):
    """Launch the kernel, or compile it alone."""
    A = compiled(candidate.arithmetic, candidate.length, candidate.head_dim)
    A = replace(A, of=tuple(replace(C, **dict(candidate.tile)) for C in A.of))
    kernel, x = KERNELS[candidate.kernel], tensors(candidate.length, candidate.head_dim)
    special = dict(H=HEADS, T=candidate.length, seed=None, kinds=None, A=A)
    special["scale"] = candidate.head_dim**-0.5
    args = {}
    for name in kernel.arg_names:
        if name.startswith("stride_"):
            args[name] = x[name.removeprefix("stride_")].stride()
        else:
            args[name] = special[name] if name in special else x[name]
    block = dict(candidate.tile)["BN" if candidate.kernel == "dkdv" else "BM"]
    grid = (BATCH * HEADS * -(-candidate.length // block),)
    if compile_only:
        kernel.warmup(**args, **dict(candidate.options), grid=grid)
    else:
        kernel[grid](**args, **dict(candidate.options))


def try_to_compile(candidate: Candidate) -> str:
    """Why a candidate does not compile, or nothing."""
    try:
        call(candidate, compile_only=True)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def time_of(candidate: Candidate) -> float:
    """Median milliseconds; infinite where the GPU has not the resources."""
    from triton.testing import do_bench

    try:
        return do_bench(lambda: call(candidate), warmup=10, rep=50, return_mode="median")
    except Exception:
        return float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--arithmetics", nargs="+", default=["fa2", "official", "paper"])
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: timing tiles needs a CUDA GPU", file=sys.stderr)
        return 2
    try:
        mixed = [a for a in args.arithmetics if "/" in a or Precision.parse(a).stochastic]
        if mixed:
            raise ValueError(
                f"{mixed[0]}: one arithmetic for all heads, and no stochastic rounding"
            )
        tried = [c for a in args.arithmetics for c in candidates(a, args.length, args.head_dim)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"compiling {len(tried)} kernels, {args.jobs} at a time", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        reasons = list(pool.map(try_to_compile, tried))
    print("timing", flush=True)
    failed = Counter(reason for reason in reasons if reason)
    for reason, count in failed.items():
        print(f"{count} do not compile: {reason}", file=sys.stderr)
    times = {c: time_of(c) for c, reason in zip(tried, reasons, strict=True) if not reason}
    if not times:
        print("error: nothing compiled", file=sys.stderr)
        return 1
    for arithmetic, kernel in itertools.product(args.arithmetics, KERNELS):
        group = [c for c in times if (c.arithmetic, c.kernel) == (arithmetic, kernel)]
        best = sorted(group, key=times.get)
        print(f"\n{kernel}, {arithmetic}, head {args.head_dim}, length {args.length}")
        for c in best[:4] + [c for c in best[4:] if c.chosen]:
            mark = "  <- attention_tiles.py" if c.chosen else ""
            print(f"  {times[c]:.4f} ms  {dict(c.tile)} {dict(c.options)}{mark}")
    if args.json:
        rows = [vars(c) | {"ms": ms} for c, ms in times.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    import multiprocessing

    multiprocessing.set_start_method("spawn")  # a forked process could not use CUDA
    sys.exit(main())
