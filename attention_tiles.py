"""What a kernel of flash_attn_stable.py is compiled for: which arithmetic and physical tile."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from precision import Precision, of_heads

ROOMY = 160 * 1024  # bytes: A100, H100 and later data-centre GPUs; consumer cards have 99 KB
HOPPER = 200 * 1024  # whose tensor cores read left operands from shared memory unless told not to
LARGEST_BLOCK = 128  # rows; every block's rows divide it


@dataclass(frozen=True)
class Constants:
    """What one compilation of a kernel fixes for heads of one arithmetic: `C` in the kernels."""

    P: Precision
    causal: bool
    fp16: bool  # inputs are FP16, otherwise BF16
    exact_scale: bool  # scale is a power of two: multiplying by it rounds nothing
    whole: bool  # blocks fill the length: no bounds to check
    cut: int  # bits of an FP32 significand that rounding an O point cuts off
    D: int
    BD: int
    BM: int = 0
    BN: int = 0
    BN_max: int = 0  # keys of a physical tile in the first of two readings; 0: one reading
    held: bool = False  # in registers: Q, Q and dO, or K and V, which a block reads once


@dataclass(frozen=True)
class Arithmetics:
    """The argument A of every kernel: the distinct arithmetics of a layer's heads."""

    n: int
    of: tuple[Constants, ...]


@lru_cache
def arithmetics(
    text: str, heads: int, T: int, D: int, causal: bool, scale: float, dtype: torch.dtype
) -> Arithmetics:
    """What is compiled for a call, but for the tiles."""
    fp16 = dtype == torch.float16  # whose small numbers a factor does round
    exact = math.frexp(scale)[0] == 0.5 and not fp16
    whole = T % LARGEST_BLOCK == 0
    BD = max(16, _next_power_of_2(D))
    of = [
        Constants(P, causal, fp16, exact, whole, _bits_cut(P, fp16), D, BD)
        for P in dict.fromkeys(of_heads(text, heads))
    ]
    return Arithmetics(len(of), tuple(of))


def _bits_cut(P: Precision, fp16: bool) -> int:
    kept = 10 if fp16 and P.mantissa_bits == 7 else P.mantissa_bits
    return 23 - kept


@lru_cache
def arithmetic_of_head(text: str, heads: int, device: torch.device) -> torch.Tensor:
    """[heads] INT32: each head's index into `Arithmetics.of`."""
    of = of_heads(text, heads)
    distinct = list(dict.fromkeys(of))
    return torch.tensor([distinct.index(P) for P in of], dtype=torch.int32, device=device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may use; as many as needed in Triton's interpreter."""
    if device.type == "cpu":
        return ROOMY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def forward_tiles(A: Arithmetics, length: int, shared: int) -> tuple[Arithmetics, dict]:
    """A with the physical tiles of the forward kernel on a GPU with `shared` bytes a block, and
    Triton's launch options, the fastest of a sweep on an H200.

    BN divides the logical tile, which is then read twice unless BN is all of it. BM is the same for
    all heads.
    """
    tiled = _each(A, lambda C: _forward_tile(C, length))
    options = dict(num_warps=4, num_stages=3 if shared >= ROOMY else 2)
    if A.of[0].BD <= 64 and any(C.BN_max for C in tiled.of):
        options["maxnreg"] = 128  # four blocks on a multiprocessor instead of two
    return tiled, options


def _forward_tile(C: Constants, length: int) -> dict:
    longest = 128 if C.BD <= 64 else 64  # logical tile that is read once
    tile = C.P.key_tile
    one = tile == "full" or tile >= length
    if one:
        tile = max(16, _next_power_of_2(length))  # keys beyond length are masked
    power = tile & -tile
    if tile == power <= longest:
        return dict(BM=64, BN=tile)
    if one:  # said so, the kernel need not keep an accumulator beside P̄V
        P = replace(C.P, key_tile="full")
        return dict(BM=64, BN=64 if C.BD <= 64 else 32, BN_max=64, P=P)
    return dict(BM=64, BN=min(32, power), BN_max=min(64, power))


@lru_cache
def dq_tiles(A: Arithmetics, shared: int) -> tuple[Arithmetics, dict]:
    """Likewise of the dQ kernel."""
    wide = A.of[0].BD > 64
    narrow = wide and any(C.P.delta == "dp_p" for C in A.of)
    stages = 3 if shared >= ROOMY and (narrow or not wide) else 2
    tile = dict(BM=64, BN=32 if narrow else 64, held=shared >= HOPPER and not wide)
    return _each(A, lambda C: tile), dict(num_warps=4, num_stages=stages)


@lru_cache
def dkdv_tiles(A: Arithmetics, shared: int) -> tuple[Arithmetics, dict]:
    """Likewise of the dK dV kernel, whose BN is the same for all heads."""
    options = dict(num_warps=4, num_stages=3 if shared >= ROOMY else 2)
    if A.of[0].BD <= 64:
        options["maxnreg"] = 128
    return _each(A, lambda C: dict(BM=32, BN=64)), options


def _each(A: Arithmetics, tile) -> Arithmetics:
    return replace(A, of=tuple(replace(C, **tile(C)) for C in A.of))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
