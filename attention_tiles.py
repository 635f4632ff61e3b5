"""What a kernel of flash_attn_stable.py is compiled for: which physical tile on which GPU."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from attention_reference import Precision

ROOMY = 160 * 1024  # bytes: A100, H100 and later data-centre GPUs; consumer cards have 99 KB


@dataclass(frozen=True)
class Constants:
    """What one compilation of a kernel fixes: the argument C of every kernel."""

    P: Precision
    causal: bool
    exact_scale: bool  # scale is a power of two: multiplying by it rounds nothing
    D: int
    BD: int
    BM: int
    BN: int
    two_passes: bool = False  # over a logical tile longer than BN


@lru_cache
def constants(D: int, causal: bool, scale: float, precision: Precision, **tile) -> Constants:
    """The constants of a call with heads of width D."""
    exact = math.frexp(scale)[0] == 0.5
    return Constants(precision, causal, exact, D, max(16, _next_power_of_2(D)), **tile)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may use; as many as needed in Triton's interpreter."""
    if device.type == "cpu":
        return ROOMY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def forward_tiles(length: int, head_dim: int, precision: Precision, shared: int):
    """Physical tile of the forward kernel on a GPU with `shared` bytes a block.

    BN divides the logical tile, which is then read twice unless BN is all of it.

    Returns:
        Fields of `Constants`, and Triton's launch options.
    """
    longest = 128 if head_dim <= 64 else 64  # logical tile that is read once
    tile = precision.key_tile
    if tile == "full" or tile >= length:
        tile = max(16, _next_power_of_2(length))  # keys beyond length are masked
    power = tile & -tile
    once = tile == power <= longest
    bn = tile if once else min(32 if head_dim <= 64 else 64, power)
    stages = 3 if shared >= ROOMY else 2
    return dict(BM=64, BN=bn, two_passes=not once), dict(num_warps=4, num_stages=stages)


@lru_cache
def backward_tiles(head_dim: int, shared: int):
    """Likewise of the dK dV kernel and of the dQ kernel."""
    stages = 3 if head_dim <= 64 and shared >= ROOMY else 2
    dkdv = dict(BM=32 if head_dim <= 64 else 64, BN=64), dict(num_warps=4, num_stages=2)
    dq = dict(BM=64, BN=64), dict(num_warps=4, num_stages=stages)
    return dkdv, dq


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
