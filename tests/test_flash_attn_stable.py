"""The Triton kernels against FP64 and against the reference, on a GPU or interpreted on the CPU."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT

pytest.importorskip("triton")

import flash_attn_stable
from attention_reference import (
    Precision,
    reference_backward,
    reference_forward,
    score_tiles,
    tile_maximum,
)
from flash_attn_stable import flash_attention, triton_backward, triton_forward

ON_GPU = torch.cuda.is_available()
ON_CPU_SHAPES = [(16, 16), (150, 48), (90, 64), (40, 80), (24, 128)]  # (length, head width)
SHAPES = [(16, 64), (113, 48), (300, 80), (1000, 128), (1024, 64), (1024, 16), (700, 32)]
SHAPES = SHAPES if ON_GPU else ON_CPU_SHAPES
OVERRIDES = [
    "official,key_tile=48,stable=paper",
    "paper,scores=fp32,stable=paper",
    "fa2,row_max=bf16,pv=bf16,stable=paper,tie_tolerance=0.01",
]
ARITHMETICS = ["official", "paper", "fa2", "official,stable=paper", "paper,stable=paper"]


def random_inputs(T, D, device, B=2, H=3, seed=0, count=4):
    """q, k, v, dO [B, H, T, D] in BF16, drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(B, H, T, D, generator=generator) for _ in range(count)]
    return [x.bfloat16().to(device) for x in draws]


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


def kernel_with_gradients(q, k, v, do, causal, scale, precision):
    o, lse = triton_forward(q, k, v, causal, scale, precision)
    return [o, *triton_backward(do, q, k, v, o, lse, causal, scale, precision)]


def reference_with_gradients(q, k, v, do, causal, scale, precision):
    o, lse = reference_forward(q, k, v, causal, scale, precision)
    return [o, *reference_backward(do, q, k, v, o, lse, causal, scale, precision)]


def within_one_ulp(a, b):
    """Whether elements are one unit in the last place of BF16 apart or closer. Where terms cancel
    to less than the tensor's RMS, the unit is that of the RMS: their sums differ in order."""
    b = b.float()
    size = torch.maximum(b.abs(), b.square().mean().sqrt())
    return (a.float() - b).abs() <= torch.exp2(torch.floor(torch.log2(size)) - 7)


@pytest.fixture
def poisoned(monkeypatch):
    """Outputs that start as NaN: an element no kernel writes is seen."""
    empty = flash_attn_stable._empty_like_heads
    poison = lambda *args: empty(*args).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(flash_attn_stable, "_empty_like_heads", poison)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_error_against_fp64(arithmetic, T, D, causal, device, poisoned):
    """At most twice (O) and three times (gradients) the error of the plain formula in BF16."""
    *qkv, do = random_inputs(T, D, device)
    scale = D**-0.5
    attend = partial(plain_attention, causal=causal, scale=scale)
    truth = with_gradients(attend, *(x.double() for x in qkv), do.double())
    plain = with_gradients(attend, *qkv, do)
    ours = kernel_with_gradients(*qkv, do, causal, scale, Precision.parse(arithmetic))
    for name, limit, x, y, z in zip("oqkv", (2, 3, 3, 3), ours, plain, truth, strict=True):
        error, allowed = (x - z).abs().max().item(), (y - z).abs().max().item()
        assert error <= limit * allowed, (name, error, allowed)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_one_key(arithmetic, device):
    """O is V; dV is dO; dQ and dK are zero but for the rounding of dP."""
    q, k, v, do = random_inputs(1, 64, device)
    o, dq, dk, dv = kernel_with_gradients(q, k, v, do, True, 0.125, Precision.parse(arithmetic))
    assert torch.equal(o, v)
    assert torch.equal(dv, do)
    rounding = (do.float() * v.float()).sum(-1).abs().max() * 2**-8 * 0.125
    assert dq.abs().max() <= rounding * k.abs().max()
    assert dk.abs().max() <= rounding * q.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("arithmetic", [*ARITHMETICS, *OVERRIDES])
def test_agrees_with_reference(arithmetic, factor, T, D, causal, device):
    """Within one unit in the last place for 99.9 % of elements; sums differ in their order."""
    inputs = random_inputs(T, D, device)
    inputs[1][:, :, 3::5] = inputs[1][:, :, :1]  # repeated keys: tied scores
    options = (causal, D**-0.5, Precision.parse(arithmetic))
    if options[2].scores == "bf16":  # FP32 exponents this large differ in rounding
        inputs[0] *= factor  # scores to 35: softmax nearly one-hot, row sums at the floor
    ours = kernel_with_gradients(*inputs, *options)
    reference = reference_with_gradients(*inputs, *options)
    for name, x, y in zip("oqkv", ours, reference, strict=True):
        assert within_one_ulp(x, y).float().mean() >= 0.999, name


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_bitwise_where_order_cannot_matter(arithmetic, device):
    """Every P̄ is 1 or 0 and every sum an exact integer: O agrees to the last bit."""
    T, D = 256, 64
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 2, (1, 2, T, 1), generator=generator)  # keys score 0 or −200
    k = (kind * -200.0 * torch.eye(D)[0]).bfloat16().to(device)
    k[:, :, 0] = 0
    q = torch.eye(D)[0].expand(1, 2, T, D).bfloat16().to(device)
    v = torch.randint(-8, 9, (1, 2, T, D), generator=generator).bfloat16().to(device)
    for causal in (True, False):
        options = (causal, 1.0, Precision.parse(arithmetic))
        o, lse = triton_forward(q, k, v, *options)
        o_reference, lse_reference = reference_forward(q, k, v, *options)
        assert torch.equal(o, o_reference)
        torch.testing.assert_close(lse, lse_reference, rtol=1e-6, atol=1e-6)


def test_scores_that_tie_once_the_maximum_is_rounded(device):
    """With FP32 scores and a BF16 maximum the kernel counts the same keys as the reference."""
    T = D = 64
    k = torch.zeros(1, 1, T, D)
    k[..., :2] = torch.tensor([8.0, 1 / 256])
    k[:, :, 1:, 1] = torch.linspace(0.5, 1, T - 1) / 512
    q = torch.zeros(1, 1, T, D)
    q[..., :2] = 1
    inputs = [x.bfloat16().to(device) for x in (q, k, torch.randn(1, 1, T, D))]
    options = (False, 1.0, Precision.parse("paper,scores=fp32,stable=paper"))
    o, lse = triton_forward(*inputs, *options)
    o_reference, lse_reference = reference_forward(*inputs, *options)
    torch.testing.assert_close(lse, lse_reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(o, o_reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arithmetic", ["paper", "official", "official,key_tile=64", "fa2"])
def test_fix_changes_only_rows_with_ties(arithmetic, device):
    """Stabilized equals original bit for bit where no tile repeats a row's maximum."""
    q, k, v = random_inputs(256, 64, device, count=3)
    original = Precision.parse(arithmetic)
    stable = Precision.parse(arithmetic + ",stable=paper")
    o, lse = triton_forward(q, k, v, True, 0.125, original)
    o_stable, lse_stable = triton_forward(q, k, v, True, 0.125, stable)
    tied = tied_rows(q, k, 0.125, stable)
    assert torch.equal(o[~tied], o_stable[~tied])
    assert torch.equal(lse[~tied], lse_stable[~tied])
    if arithmetic != "fa2":  # FP32 scores do not repeat
        assert 0.001 < tied.float().mean() < 0.5
        assert not torch.equal(o[tied], o_stable[tied])


def tied_rows(q, k, scale, precision):
    """Rows in which the fix moves the maximum of some tile."""
    moved = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    for rows, _, s in score_tiles(q.float(), k.float(), True, scale, precision):
        moved[:, :, rows] |= tile_maximum(s, precision) != s.amax(-1)
    return moved


def attend_to_two_maxima(r_m, precision, device):
    """O and LSE of rows with scores r_m, r_m, r_m − 1, …; V is 1."""
    T, D = 64, 64
    k = torch.zeros(1, 1, T, D, device=device)
    k[..., 0] = r_m - 1
    k[:, :, :2, 0] = r_m
    q = torch.eye(D, device=device)[0].expand_as(k)
    args = (x.bfloat16() for x in (q, k, torch.ones_like(k)))
    return triton_forward(*args, False, 1.0, Precision.parse(precision))


@pytest.mark.parametrize("r_m", [100.0, -100.0])
def test_papers_fix_underflows_for_large_repeated_maxima(r_m, device):
    """A hole of the paper's Algorithm 1: e^(r_m − β r_m) is 0 in FP32, and so is the row sum."""
    assert attend_to_two_maxima(r_m, "paper,stable=paper", device)[0].isnan().all()
    assert (attend_to_two_maxima(r_m, "paper", device)[0] == 1).all()


def test_authors_floor_shrinks_rows_of_moderate_repeated_maxima(device):
    """Their code raises Σ P̄ to 1e-10: no NaN, but from r_m ≈ 23 on O is too small."""
    o, lse = attend_to_two_maxima(40.0, "official,stable=paper", device)
    exact, _ = attend_to_two_maxima(40.0, "official,stable=paper,row_sum_floor=0", device)
    assert (exact == 1).all()
    sum_of_weights = (2 + 62 * math.exp(-1)) * math.exp(-40)
    assert o.float().mean().item() == pytest.approx(sum_of_weights / 1e-10, rel=0.02)
    assert lse.mean().item() == pytest.approx(80 + math.log(1e-10), rel=1e-3)
    assert (attend_to_two_maxima(100.0, "official,stable=paper", device)[0] == 0).all()


def test_strides(device):
    """Any layout gives the same bits as the contiguous one."""
    T, D = 130, 48
    inputs = random_inputs(T, D, device)
    qkv = torch.randn(2, T, 3, 3, D, device=device).bfloat16()
    views = [
        qkv[:, :, 0].transpose(1, 2),  # as the model's projection leaves them
        torch.empty(2, 3, D, T, device=device, dtype=torch.bfloat16).mT,
        torch.empty(2, 3, T, 2 * D, device=device, dtype=torch.bfloat16)[..., ::2],
        torch.empty(3, 2, T, D, device=device, dtype=torch.bfloat16).transpose(0, 1),
    ]
    for view, x in zip(views, inputs, strict=True):
        view.copy_(x)
    options = (True, D**-0.5, Precision.parse("official,stable=paper"))
    contiguous = kernel_with_gradients(*inputs, *options)
    for x, y in zip(contiguous, kernel_with_gradients(*views, *options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("arithmetic", ["official,stable=paper", "fa2"])
def test_rerun_gives_the_same_bits(arithmetic, device):
    T, D = SHAPES[1]
    inputs = random_inputs(T, D, device)
    options = (True, D**-0.5, Precision.parse(arithmetic))
    first = kernel_with_gradients(*inputs, *options)
    for x, y in zip(first, kernel_with_gradients(*inputs, *options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("arithmetic", ["official,stable=paper", "fa2", "fa2,output=fp32"])
def test_compiled_and_eager_agree(arithmetic, device):
    """torch.compile takes the call whole, and neither O nor a gradient changes."""
    *qkv, do = random_inputs(100, 32, device)
    attend = partial(flash_attention, causal=True, precision=arithmetic)
    eager = with_gradients(attend, *qkv, do)
    compiled = with_gradients(torch.compile(attend, fullgraph=True), *qkv, do)
    for x, y in zip(eager, compiled, strict=True):
        assert torch.equal(x, y)


def test_operators_keep_torchs_contract(device):
    """torch.library's own checks: schema, fake tensors with the right strides, autograd."""
    q, k, v = (x.requires_grad_() for x in random_inputs(40, 16, device, count=3))
    args = (q, k, v, True, 0.25, "official")
    torch.library.opcheck(torch.ops.flash_attn_stable.forward.default, args)


def test_only_some_inputs_need_gradients(device):
    q, k, v, do = random_inputs(40, 16, device)
    everything = with_gradients(flash_attention, q, k, v, do)
    v.requires_grad_()
    flash_attention(q, k, v).backward(do)
    assert torch.equal(v.grad, everything[3])
    assert q.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(1, 1, 8, 16)), "bfloat16"),
        (dict(q=torch.zeros(1, 1, 9, 16).bfloat16()), "one shape"),
        (dict(q=torch.zeros(1, 8, 16).bfloat16()), "one shape"),
        (dict(scale=0.0), "scale"),
        (dict(precision="unheard-of"), "unknown arithmetic"),
        (dict(precision="paper,stabel=paper"), "field=value"),
    ],
)
def test_unsupported_input(change, message):
    q, k, v = random_inputs(8, 16, "cpu", B=1, H=1, count=3)
    with pytest.raises(ValueError, match=message):
        flash_attention(**(dict(q=q, k=k, v=v) | change))


@pytest.mark.parametrize("D", [8, 129])
def test_unsupported_width(D):
    q, k, v = random_inputs(8, D, "cpu", count=3)
    with pytest.raises(ValueError, match="head width must be 16 to 128"):
        flash_attention(q, k, v)


@pytest.mark.gpu
def test_many_heads():
    """More heads than one dimension of a grid holds."""
    q, k, v, do = random_inputs(16, 16, "cuda", B=70_000, H=1)
    options = (True, 0.25, Precision.parse("fa2"))
    ours = kernel_with_gradients(q, k, v, do, *options)
    for x, y in zip(ours, reference_with_gradients(q, k, v, do, *options), strict=True):
        torch.testing.assert_close(x[-100:], y[-100:], rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    """Offsets are 64-bit: the last head lies beyond 2³¹ elements."""
    B, H, T, D = 9, 4, 16384, 4096
    big = torch.zeros(B, H, T, D, dtype=torch.bfloat16, device="cuda")[..., :64]
    x = torch.randn(1, 1, T, 64, device="cuda").bfloat16()
    big[-1, -1] = x[0, 0]
    precision = Precision.parse("fa2")
    o, _ = triton_forward(big, big, big, True, 0.125, precision)
    assert torch.equal(o[-1, -1], triton_forward(x, x, x, True, 0.125, precision)[0][0, 0])


@pytest.mark.parametrize(
    ("capability", "shared"), [(80, 163 * 1024), (86, 99 * 1024), (90, 227 * 1024)]
)
def test_compiles_for_gpus_not_at_hand(capability, shared):
    """Machine code for A100, the 24 GB consumer cards and H100 fits their shared memory."""
    code = f"import compile_kernels; compile_kernels.main({capability}, {shared})"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    used = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(used) == 12
    assert max(used) <= shared
