"""Random shapes, strides, scales, arithmetics and masks against FP64."""

import random
from functools import partial

import pytest
import torch
from attention_cases import kernel_with_gradients, plain_attention, random_inputs, with_gradients

pytest.importorskip("triton")

from precision import of_heads

ON_GPU = torch.cuda.is_available()
KINDS = 60  # of compiled kernels
CASES = 17 if ON_GPU else 1  # of each
ARITHMETICS = [
    "official", "official,stable=paper", "official,stable=bounded,delta=dp_p", "paper",
    "paper,stable=paper,beta=7", "paper,stable=bounded", "paper,delta=o_fp32", "fa2",
    "fa2,delta=dp_p", "official,key_tile=16", "official,key_tile=48,stable=bounded",
    "official,key_tile=128,row_sum=fp32", "paper,mantissa_bits=4", "fa2,scores=bf16",
    "paper,rounding=stochastic", "official,scores=fp32,dp=fp32", "fa2,pv=bf16,key_tile=32",
    "official/fa2@1", "paper,accumulator=fp32,output=fp32,row_max=fp32",
    "official,p_sum=bf16", "fa2,p_operand=fp32", "fa2,p_sum=bf16,delta=dp_p",
]  # fmt: skip


def laid_out(x: torch.Tensor, layout: int) -> torch.Tensor:
    """The same values with other strides."""
    B, H, T, D = x.shape
    if layout == 0:
        y = torch.empty_like(x)
    elif layout == 1:  # as a projection to q, k and v leaves them
        y = x.new_empty(B, T, 3, H, D)[:, :, 1].transpose(1, 2)
    elif layout == 2:
        y = x.new_empty(H, B, T + 3, 2 * D)[:, :, 3:, ::2].transpose(0, 1)
    else:
        y = x.new_empty(B, H, D, T).mT
    return y.copy_(x)


@pytest.mark.parametrize("kind", range(KINDS))
def test_fuzz(kind, device, poisoned):
    """RMS errors at most 2 times (O) and 3 times (gradients) those of the plain formula in the same
    16 bits, more where fewer bits are asked for, and the same bits on a rerun."""
    rng = random.Random(kind)
    arithmetic = ARITHMETICS[kind % len(ARITHMETICS)]
    P = of_heads(arithmetic, 2)[0]
    dtype = torch.float16 if rng.random() < 0.25 else torch.bfloat16
    D = rng.choice([16, 24, 32, 48, 64, 80, 96, 128] if ON_GPU else [16, 24, 32])
    causal = rng.random() < 0.6
    scale = rng.choice([None, D**-0.5, 0.25])
    layouts = [rng.randrange(4) for _ in range(4)]
    bits = 10 if dtype == torch.float16 else 7
    coarser = 2 ** (bits - P.mantissa_bits) if P.mantissa_bits < 7 else 1
    coarser *= 2 if P.rounding == "stochastic" else 1
    largest = 3.0 if dtype == torch.bfloat16 else 0.0
    if P.stable == "paper":  # which shifts by β times the maximum: rows beyond that underflow
        largest = 0.0 if dtype == torch.bfloat16 else -0.5
    for case in range(CASES):
        T = rng.choice([rng.randint(1, 70), 128]) if not ON_GPU else rng.choice([
            rng.randint(1, 1100), 128 * rng.randint(1, 8), rng.randint(1, 40)])  # fmt: skip
        size = 10 ** rng.uniform(-3, largest)
        B = rng.choice([1, 2, 5])
        *qkv, do = random_inputs(T, D, device, B=B, H=2, seed=1000 * kind + case, dtype=dtype)
        qkv[0] *= size * D**-0.5 / (scale or D**-0.5)  # scores are about `size`
        if rng.random() < 0.3:
            qkv[1][:, :, 1::3] = qkv[1][:, :, :1]  # ties
        options = (causal, scale or D**-0.5)
        attend = partial(plain_attention, causal=causal, scale=options[1])
        truth = with_gradients(attend, *(x.double() for x in qkv), do.double())
        plain = with_gradients(attend, *qkv, do)
        inputs = list(map(laid_out, (*qkv, do), layouts))
        seed = torch.tensor([case], device=device) if P.stochastic else None
        where = (arithmetic, dtype, T, D, causal, size, layouts)
        ours = kernel_with_gradients(*inputs, *options, arithmetic, seed)
        again = kernel_with_gradients(*inputs, *options, arithmetic, seed)
        differing = [
            n for n, x, y in zip("oqkvδ", ours, again, strict=True) if not torch.equal(x, y)
        ]
        assert not differing, (differing, *where)
        floors = rounding_floor(*qkv, options[1], dtype)
        for name, limit, floor, x, y, z in zip("oqkv", (2, 3, 3, 3), floors, ours, plain, truth):  # noqa: B905
            error, allowed = rms(x - z), coarser * (limit * rms(y - z) + floor)
            assert error <= allowed, (name, error, allowed, *where)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def rounding_floor(q, k, v, scale, dtype) -> list[float]:
    """What one rounding of P, dP or O may do where softmax is so sharp that the plain formula's
    errors vanish: one unit in the last place of dP, times what it is multiplied by; two of O."""
    unit = torch.finfo(dtype).eps
    dp = rms(v) * v.shape[-1] ** 0.5
    return [2 * unit * rms(v), unit * scale * dp * rms(k), unit * scale * dp * rms(q), unit]
