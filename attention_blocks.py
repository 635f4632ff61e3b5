"""
What the kernels are built from: roundings, products, scores, loads and stores.

`C` is the `Constants` of a compilation, `C.P` its `Precision`. Rounded values stay FP32. In
kernels i_ is an index, o_ an offset within a tile, p_ a pointer, m_ a mask, b_ a block's value.
Strides come as tuples (batch, head, time, width). Scores whose factor is a power of two stay
without it, and `unit_of` says what they are still to be multiplied by.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
    LOG2E = tl.constexpr(1.4426950408889634)
    LN2 = tl.constexpr(0.6931471805599453)
except ImportError:  # no Triton for this platform: CPU tensors run the reference
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None)
    INTERPRETED = LOG2E = LN2 = None


@triton.jit
def nearest_even(b_x, CUT: tl.constexpr):
    """FP32 values without the last CUT bits of their significands, ties to even."""
    b_u = b_x.to(tl.uint32, bitcast=True)
    b_u = (b_u + ((1 << (CUT - 1)) - 1) + ((b_u >> CUT) & 1)) >> CUT << CUT
    return tl.where(b_x == b_x, b_u.to(tl.float32, bitcast=True), b_x)  # a NaN would carry over


@triton.jit
def up_by_chance(b_x, b_random, CUT: tl.constexpr):
    """The same cut, away from zero with the probability of what is cut off: right on average."""
    b_u = b_x.to(tl.uint32, bitcast=True)
    b_u = (b_u + (b_random & ((1 << CUT) - 1))) >> CUT << CUT
    return tl.where(b_x == b_x, b_u.to(tl.float32, bitcast=True), b_x)


@triton.jit
def rounded(b_x, C: tl.constexpr):
    """To the 16-bit format of the inputs, nearest even."""
    if C.fp16:
        b_x = b_x.to(tl.float16).to(tl.float32)
    elif INTERPRETED:  # its cast to BF16 truncates
        b_x = nearest_even(b_x, 16)
    else:  # the pair (x, 0) is x in FP32; a cast of one runs at a quarter of the rate, as exp2 does
        b_x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,r", [b_x], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return b_x


@triton.jit
def rounded_output(b_x, b_random, C: tl.constexpr):
    """As the points pv, accumulator and output round. b_random: 32 random bits an element."""
    if C.P.stochastic:
        b_x = up_by_chance(b_x, b_random, C.cut)
    elif C.P.mantissa_bits < 7:
        b_x = nearest_even(b_x, C.cut)
    return rounded(b_x, C)


@triton.jit
def random_words(seed, b_index, tile, C: tl.constexpr):
    """Four words of 32 random bits for each element of O and logical tile (Philox 4×32-10 with the
    64-bit seed as key and element and tile as counter): for pv, accumulator twice, and output."""
    if C.P.stochastic:
        b_low = b_index.to(tl.uint32)
        b_high = (b_index >> 32).to(tl.uint32)
        b_none = tl.zeros_like(b_low)
        b_words = tl.philox(seed, b_low, b_high, b_none + tile, b_none)
    else:
        b_words = (0, 0, 0, 0)
    return b_words


@triton.jit
def operand(b_x, C: tl.constexpr):
    """Values as a tensor core takes them."""
    if INTERPRETED:  # its product of BF16 blocks is wrong; FP32 is exact on 16-bit values
        b_x = rounded(b_x.to(tl.float32), C)
    else:
        b_x = b_x.to(tl.float16 if C.fp16 else tl.bfloat16)
    return b_x


@triton.jit
def dot(b_a, b_b, b_acc, C: tl.constexpr):
    """b_acc + b_a b_b with 16-bit operands, accumulated in FP32."""
    return tl.dot(operand(b_a, C), operand(b_b, C), b_acc)


@triton.jit
def place(i, n, H):
    """Block, head of a sequence and head of all, of program i where each head has n blocks."""
    i_bh = (i // n).to(tl.int64)
    return i % n, i_bh % H, i_bh


@triton.jit
def of_head(x, i_bh, H, stride):
    """Where one head of one sequence begins."""
    return x + i_bh // H * stride[0] + i_bh % H * stride[1]


@triton.jit
def rows(x, start, stride, C: tl.constexpr, N: tl.constexpr):
    """Pointers to rows start … start + N − 1 of a [T, D] matrix, [N, BD]."""
    p_x = x + tl.cast(start, tl.int64) * stride[2]
    return p_x + tl.arange(0, N)[:, None] * stride[2] + tl.arange(0, C.BD)[None, :] * stride[3]


@triton.jit
def inside(start, T, C: tl.constexpr, N: tl.constexpr):
    """Which elements of such a block exist."""
    m_x = (start + tl.arange(0, N) < T)[:, None]
    if C.D < C.BD:
        m_x = m_x & (tl.arange(0, C.BD) < C.D)[None, :]
    return m_x


@triton.jit
def load_rows(x, start, stride, T, C: tl.constexpr, N: tl.constexpr):
    """Rows start … start + N − 1 of a [T, D] matrix as [N, BD], zero outside it."""
    p_x = rows(x, start, stride, C, N)
    if C.whole and C.D == C.BD:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=inside(start, T, C, N), other=0.0)
    return b_x


@triton.jit
def load_vector(x, start, T, C: tl.constexpr, N: tl.constexpr):
    """Elements start … start + N − 1 of x [T], zero outside it."""
    o_t = start + tl.arange(0, N)
    return tl.load(x + o_t) if C.whole else tl.load(x + o_t, mask=o_t < T, other=0.0)


@triton.jit
def store_rows(x, b_x, start, stride, T, C: tl.constexpr, N: tl.constexpr):
    """The counterpart of `load_rows`."""
    if INTERPRETED and x.dtype.element_ty == tl.bfloat16:
        b_x = nearest_even(b_x, 16)
    m_x = tl.broadcast_to(inside(start, T, C, N), [N, C.BD])
    tl.store(rows(x, start, stride, C, N), b_x.to(x.dtype.element_ty), mask=m_x)


@triton.jit
def held(b_x, C: tl.constexpr):
    """A left operand of many products: where the tiles say so, in registers, which spares shared
    memory's bandwidth. A product with 1 is exact, and its result lies as an operand does."""
    if C.held and not INTERPRETED:
        o_d = tl.arange(0, C.BD)
        b_one = (o_d[:, None] == o_d[None, :]).to(b_x.dtype)
        b_x = tl.dot(b_x, b_one).to(b_x.dtype)
    return b_x


@triton.jit
def product_transposed(b_a, b_b, C: tl.constexpr):
    """A Bᵀ in FP32."""
    return dot(b_a, tl.trans(b_b), tl.full([b_a.shape[0], b_b.shape[0]], 0.0, dtype=tl.float32), C)


@triton.jit
def rounded_scores(b_s, scale, C: tl.constexpr):
    """The roundings of S. They keep the order of scores: a maximum may be rounded afterwards."""
    if C.P.scores == "bf16":
        b_s = rounded(b_s, C)
        if not C.exact_scale:
            b_s = rounded(b_s * scale, C)
    return b_s


@triton.jit
def unit_of(scale, C: tl.constexpr):
    """What rounded scores are still to be multiplied by."""
    if C.P.scores == "bf16" and not C.exact_scale:
        return 1.0
    return scale


@triton.jit
def visible(start_q, start_k, T, C: tl.constexpr, N: tl.constexpr):
    """Which of N keys exist and are seen by which queries, [BM, N]."""
    o_k = tl.arange(0, N)[None, :]
    if C.causal:  # queries that exist see no key beyond T
        m_s = (tl.arange(0, C.BM) + (start_q - start_k))[:, None] >= o_k
    else:
        m_s = tl.broadcast_to(o_k < T - start_k, [C.BM, N])
    return m_s


@triton.jit
def unmasked_keys(start_q, T, C: tl.constexpr, N: tl.constexpr):
    """Keys before this, a multiple of N, exist and are seen by every query of the block."""
    return (start_q if C.causal else T) // N * N


def on(device: torch.device):
    """Kernels launch on the current GPU: make it the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def empty_like_heads(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[B, H, T, D] stored as [B, T, H, D]: the model's reshape to [B, T, H · D] copies nothing."""
    B, H, T, D = q.shape
    return torch.empty(B, T, H, D, dtype=dtype or q.dtype, device=q.device).transpose(1, 2)


def with_dense_rows(*tensors: Tensor) -> list[Tensor]:
    """[…, T, D] tensors whose rows lie in one piece, as all do that a projection makes; others are
    copied. (On an H200 with Triton 3.6, kernels for rows with gaps failed; README, Limits.)"""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
