"""Inputs of attention, and its results by the kernels, the reference and the plain formula."""

import torch

from attention_reference import reference_backward, reference_forward
from flash_attn_stable import output_for_delta, triton_backward, triton_forward


def random_inputs(T, D, device, B=2, H=3, seed=0, count=4, dtype=torch.bfloat16):
    """q, k, v, dO [B, H, T, D], drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(B, H, T, D, generator=generator) for _ in range(count)]
    return [x.to(dtype).to(device) for x in draws]


def plain_attention(q, k, v, causal, scale):
    """The plain formula in the dtype of its inputs."""
    s = (q @ k.mT) * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(s, -1) @ v


def with_gradients(attend, q, k, v, do):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attend(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.to(o.dtype))]


def kernel_with_gradients(q, k, v, do, causal, scale, precision, seed=None):
    """O, dQ, dK, dV and δ by the Triton kernels."""
    o, lse = triton_forward(q, k, v, causal, scale, precision, seed)
    o_of_delta = output_for_delta(q, k, v, o, causal, scale, precision)
    do = do.to(o.dtype)
    return [o, *triton_backward(do, q, k, v, o_of_delta, lse, causal, scale, precision)]


def reference_with_gradients(q, k, v, do, causal, scale, precision, seed=None):
    """O, dQ, dK, dV and δ by the reference."""
    o, lse = reference_forward(q, k, v, causal, scale, precision, seed)
    do = do.to(o.dtype)
    return [o, *reference_backward(do, q, k, v, o, lse, causal, scale, precision)]


def within_one_ulp(a, b):
    """Whether elements are one unit in the last place of BF16 apart or closer. Where terms cancel
    to less than the tensor's RMS, the unit is that of the RMS: their sums differ in order."""
    b = b.float()
    size = torch.maximum(b.abs(), b.square().mean().sqrt())
    return (a.float() - b).abs() <= torch.exp2(torch.floor(torch.log2(size)) - 7)
