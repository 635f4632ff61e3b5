"""The Triton kernels against FP64 and against the reference, on a GPU or interpreted on the CPU."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from attention_cases import (
    kernel_with_gradients,
    plain_attention,
    random_inputs,
    reference_with_gradients,
    with_gradients,
    within_one_ulp,
)
from conftest import ROOT
from torch import library

pytest.importorskip("triton")

from attention_reference import reference_forward, score_tiles, tile_maximum
from attention_tiles import ROOMY, arithmetics, forward_tiles
from flash_attn_stable import flash_attention, triton_forward
from precision import Precision, of_heads

ON_GPU = torch.cuda.is_available()
ON_CPU_SHAPES = [(16, 16), (150, 48), (90, 64), (40, 80), (24, 128)]  # (length, head width)
SHAPES = [(16, 64), (113, 48), (300, 80), (1000, 128), (1024, 64), (1024, 16), (700, 32)]
SHAPES = SHAPES if ON_GPU else ON_CPU_SHAPES
OVERRIDES = [
    "official,delta=dp_p,stable=bounded",
    "paper,delta=o_fp32,mantissa_bits=3",
    "fa2,delta_error=0.25",
    "official,delta_noise=0.25,delta_offset=-0.1",
    "official,key_tile=32/fa2,delta=dp_p@1",
    "official,key_tile=48,stable=paper",
    "official,p_sum=bf16",
    "fa2,scores=bf16,p_operand=fp32",
    "paper,scores=fp32,stable=paper",
    "fa2,row_max=bf16,pv=bf16,stable=paper,tie_tolerance=0.01",
]
ARITHMETICS = ["official", "paper", "fa2", "official,stable=paper", "paper,stable=paper"]
SCALED = [  # by 8, scores reach 35: softmax nearly one-hot, row sums at the floor
    (text, factor)
    for text in [*ARITHMETICS, *OVERRIDES]
    for factor in (1, 8)
    # FP32 exponents as large differ in rounding
    if factor == 1 or of_heads(text, 3)[0].scores == "bf16"
]


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
    ours = kernel_with_gradients(*qkv, do, causal, scale, arithmetic)
    for name, limit, x, y, z in zip("oqkv", (2, 3, 3, 3), ours[:4], plain, truth, strict=True):
        error, allowed = (x - z).abs().max().item(), (y - z).abs().max().item()
        assert error <= limit * allowed, (name, error, allowed)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_one_key(arithmetic, device):
    """O is V; dV is dO; dQ and dK are zero but for the rounding of dP."""
    q, k, v, do = random_inputs(1, 64, device)
    o, dq, dk, dv, _ = kernel_with_gradients(q, k, v, do, True, 0.125, arithmetic)
    assert torch.equal(o, v)
    assert torch.equal(dv, do)
    rounding = (do.float() * v.float()).sum(-1).abs().max() * 2**-8 * 0.125
    assert dq.abs().max() <= rounding * k.abs().max()
    assert dk.abs().max() <= rounding * q.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D"), SHAPES)
@pytest.mark.parametrize(("arithmetic", "factor"), SCALED)
def test_agrees_with_reference(arithmetic, factor, T, D, causal, device):
    """Within one unit in the last place for 99.9 % of elements; sums differ in their order."""
    inputs = random_inputs(T, D, device, B=2 if ON_GPU or T < 100 else 1)
    inputs[0] *= factor
    inputs[1][:, :, 3::5] = inputs[1][:, :, :1]  # repeated keys: tied scores
    options = (causal, D**-0.5, arithmetic)
    ours = kernel_with_gradients(*inputs, *options)
    reference = reference_with_gradients(*inputs, *options)
    for name, x, y in zip("oqkvδ", ours, reference, strict=True):
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
        options = (causal, 1.0, arithmetic)
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
    options = (False, 1.0, "paper,scores=fp32,stable=paper")
    o, lse = triton_forward(*inputs, *options)
    o_reference, lse_reference = reference_forward(*inputs, *options)
    torch.testing.assert_close(lse, lse_reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(o, o_reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arithmetic", ["paper", "official", "official,key_tile=64", "fa2"])
def test_fix_changes_only_rows_with_ties(arithmetic, device):
    """Stabilized equals original bit for bit where no tile repeats a row's maximum."""
    q, k, v = random_inputs(256, 64, device, count=3)
    original = arithmetic
    stable = arithmetic + ",stable=paper"
    o, lse = triton_forward(q, k, v, True, 0.125, original)
    o_stable, lse_stable = triton_forward(q, k, v, True, 0.125, stable)
    tied = tied_rows(q, k, 0.125, stable)
    assert torch.equal(o[~tied], o_stable[~tied])
    assert torch.equal(lse[~tied], lse_stable[~tied])
    if arithmetic != "fa2":  # FP32 scores do not repeat
        assert 0.001 < tied.float().mean() < 0.5
        assert not torch.equal(o[tied], o_stable[tied])


@pytest.mark.parametrize("arithmetic", ["paper", "official,key_tile=32,mantissa_bits=4"])
def test_stochastic_rounding_draws_what_the_reference_draws(arithmetic, device):
    """The same bits for the same seed, others for another, and the right value on average."""
    T, D = 100, 32
    arithmetic += ",rounding=stochastic"
    *qkv, do = random_inputs(T, D, device)
    seeds = [torch.tensor([seed], device=device) for seed in (2**40 + 7, 2**40 + 8)]
    options = (True, D**-0.5, arithmetic)
    ours = kernel_with_gradients(*qkv, do, *options, seeds[0])
    for x, y in zip(ours, reference_with_gradients(*qkv, do, *options, seeds[0]), strict=True):
        assert within_one_ulp(x, y).float().mean() >= 0.999
    other, _ = triton_forward(*qkv, *options, seeds[1])
    assert (ours[0] != other).float().mean() > 0.2


def test_stochastic_rounding_is_right_on_average(device):
    """P̄V = 257 is 256 or 258 in BF16, each half of the time, for each row and feature anew."""
    T, D = 64, 64
    q = k = torch.zeros(4, 4, T, D, device=device).bfloat16()
    v = torch.zeros_like(q)
    v[:, :, 0], v[:, :, 1] = 256, 1
    arithmetic = "fa2,key_tile=full,pv=bf16,output=fp32,rounding=stochastic"
    seed = torch.tensor([5], device=device)
    pv = triton_forward(q, k, v, False, 1.0, arithmetic, seed)[0] * T
    up = pv == 258
    assert ((pv == 256) | up).all()
    assert abs(up.float().mean() - 0.5) < 5 * 0.5 / up.numel() ** 0.5
    for dim in range(4):  # neighbours are independent
        first, second = up.narrow(dim, 0, up.shape[dim] - 1), up.narrow(dim, 1, up.shape[dim] - 1)
        assert abs((first == second).float().mean() - 0.5) < 5 * 0.5 / first.numel() ** 0.5


def test_each_call_draws_its_own_seed(device):
    """From torch's generator: repeated by its seed, and by no other call, compiled or not."""
    q, k, v = random_inputs(40, 16, device, count=3)
    for attend in (flash_attention, torch.compile(flash_attention)):
        attend = partial(attend, precision="paper,rounding=stochastic")
        torch.manual_seed(1)
        first, second = attend(q, k, v), attend(q, k, v)
        torch.manual_seed(1)
        assert torch.equal(first, attend(q, k, v))
        assert not torch.equal(first, second)


def test_heads_of_one_layer_may_differ(device):
    """Each head has the bits it has when all heads share its arithmetic."""
    texts = ["official", "fa2", "paper,stable=paper,delta=dp_p"]
    *qkv, do = random_inputs(90, 32, device)
    options = (True, 32**-0.5)
    mixed = kernel_with_gradients(*qkv, do, *options, f"{texts[0]}/{texts[1]}@1/{texts[2]}@2")
    for head, text in enumerate(texts):
        alone = kernel_with_gradients(*qkv, do, *options, text)
        for x, y in zip(mixed, alone, strict=True):
            assert torch.equal(x[:, head], y[:, head])


def test_rows_of_ds_sum_to_zero(device):
    """With δ = rowsum(dP ∘ P) / rowsum(P), whatever O is: dQ does not see all keys moved by one
    vector."""
    q, k, v, do = random_inputs(100, 32, device)
    moved = k + 8
    shift = {}
    for delta in ("o", "dp_p"):
        arithmetic = f"paper,mantissa_bits=2,scores=fp32,dp=fp32,delta={delta}"
        _, dq, *_ = kernel_with_gradients(q, k, v, do, False, 0.2, arithmetic)
        _, dq_moved, *_ = kernel_with_gradients(q, moved, v, do, False, 0.2, arithmetic)
        shift[delta] = (dq_moved.float() - dq.float()).abs().mean().item()
    assert shift["dp_p"] < shift["o"] / 5


def tied_rows(q, k, scale, precision):
    """Rows in which the fix moves the maximum of some tile."""
    moved = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    P = Precision.parse(precision)
    for rows, _, s in score_tiles(q.float(), k.float(), True, scale, P):
        moved[:, :, rows] |= tile_maximum(s, P) != s.amax(-1)
    return moved


def attend_to_two_maxima(r_m, precision, device):
    """O and LSE of rows with scores r_m, r_m, r_m − 1, …; V is 1."""
    T, D = 64, 64
    k = torch.zeros(1, 1, T, D, device=device)
    k[..., 0] = r_m - 1
    k[:, :, :2, 0] = r_m
    q = torch.eye(D, device=device)[0].expand_as(k)
    args = (x.bfloat16() for x in (q, k, torch.ones_like(k)))
    return triton_forward(*args, False, 1.0, precision)


@pytest.mark.parametrize("r_m", [100.0, -100.0])
def test_papers_fix_underflows_for_large_repeated_maxima(r_m, device):
    """A hole of the paper's Algorithm 1: e^(r_m − β r_m) is 0 in FP32, and so is the row sum."""
    assert attend_to_two_maxima(r_m, "paper,stable=paper", device)[0].isnan().all()
    assert (attend_to_two_maxima(r_m, "paper", device)[0] == 1).all()


@pytest.mark.parametrize("r_m", [1e4, 100.0, 1.0, 0.0, -1.0, -100.0, -1e4])
@pytest.mark.parametrize("base", ["official", "paper", "official,key_tile=16", "fa2"])
def test_bounded_shift_never_underflows(base, r_m, device):
    """Nor does it leave out r_m = 0: O is 1, and l is another number, rounded elsewhere."""
    o, lse = attend_to_two_maxima(r_m, base + ",stable=bounded,output=fp32", device)
    torch.testing.assert_close(o, torch.ones_like(o), rtol=2**-7, atol=0)
    _, lse_plain = attend_to_two_maxima(r_m, base + ",output=fp32", device)
    torch.testing.assert_close(lse, lse_plain, rtol=1e-6, atol=0.015)
    if base == "paper" and abs(r_m) <= 100:
        assert not torch.equal(lse, lse_plain)


def test_bounded_shift_is_the_same_for_any_tile(device):
    """Without roundings, softmax does not depend on the shift, nor the shift's place on tiles."""
    q, k, v = random_inputs(100, 32, device, count=3)
    k[:, :, 3::5] = k[:, :, :1]
    points = "fa2,output=fp32,stable=bounded"
    one, _ = triton_forward(q, k, v, True, 3.0, points + ",key_tile=full")
    for tile in (16, 48, 64):
        o, _ = triton_forward(q, k, v, True, 3.0, points + f",key_tile={tile}")
        torch.testing.assert_close(o, one, rtol=2e-2, atol=1e-2)  # P̄ is a 16-bit operand


def test_authors_floor_shrinks_rows_of_moderate_repeated_maxima(device):
    """Their code raises Σ P̄ to 1e-10: no NaN, but from r_m ≈ 23 on O is too small."""
    o, lse = attend_to_two_maxima(40.0, "official,stable=paper", device)
    exact, _ = attend_to_two_maxima(40.0, "official,stable=paper,row_sum_floor=0", device)
    assert (exact == 1).all()
    sum_of_weights = (2 + 62 * math.exp(-1)) * math.exp(-40)
    assert o.float().mean().item() == pytest.approx(sum_of_weights / 1e-10, rel=0.02)
    assert lse.mean().item() == pytest.approx(80 / math.log(2) + math.log2(1e-10), rel=1e-3)
    assert (attend_to_two_maxima(100.0, "official,stable=paper", device)[0] == 0).all()


def test_strides(device):
    """Any layout gives the O of the contiguous one; δ's sums may take another order."""
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
    options = (True, D**-0.5, "official,stable=paper")
    o, *contiguous = kernel_with_gradients(*inputs, *options)
    o_of_views, *gradients = kernel_with_gradients(*views, *options)
    assert torch.equal(o, o_of_views)
    for x, y in zip(gradients, contiguous, strict=True):
        assert within_one_ulp(x, y).all()


@pytest.mark.parametrize("arithmetic", ["official,stable=paper", "fa2"])
def test_rerun_gives_the_same_bits(arithmetic, device):
    T, D = SHAPES[1]
    inputs = random_inputs(T, D, device)
    options = (True, D**-0.5, arithmetic)
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


@pytest.mark.parametrize("arithmetic", ["official", "fa2"])
def test_autocast_changes_nothing(arithmetic, device):
    """Nothing inside is cast: neither kernels nor, on a CPU, the products of the reference."""
    *qkv, do = random_inputs(60, 32, device)
    attend = partial(flash_attention, precision=arithmetic)
    plain = with_gradients(attend, *qkv, do)
    with torch.autocast(device, torch.bfloat16):
        cast = with_gradients(attend, *qkv, do)
    assert all(map(torch.equal, plain, cast))


def test_operators_keep_torchs_contract(device):
    """What torch itself checks: schema, fake tensors with the right strides."""
    q, k, v, do = random_inputs(40, 16, device)
    ops = torch.ops.flash_attn_stable
    checks = ("test_schema", "test_faketensor")
    options = (True, 0.25, "official")
    library.opcheck(ops.forward.default, (q, k, v, *options, None), test_utils=checks)
    saved = ops.forward(q, k, v, *options, None)
    library.opcheck(ops.backward.default, (do, q, k, v, *saved, *options), test_utils=checks)


def test_gradients_have_no_gradients(device):
    """They were rounded on the way: a second derivative would be silently wrong."""
    q, k, v = (x.requires_grad_() for x in random_inputs(20, 16, device, count=3))
    loss = flash_attention(q, k, v).square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.float().square().sum().backward()


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
        (dict(q=torch.zeros(1, 1, 8, 16).half()), "bfloat16 or all float16"),
        (dict.fromkeys("qkv", torch.zeros(1, 1, 8, 16).double()), "bfloat16 or all float16"),
        (dict(v=torch.zeros(1, 1, 8, 16, device="meta").bfloat16()), "one CUDA device or the CPU"),
        (dict(precision="paper/fa2@1"), "with heads 0 to 0"),
        (
            dict(precision="paper,rounding=stochastic", seed=torch.zeros(1)),
            "seed must be one int64",
        ),
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
    options = (True, 0.25, "fa2")
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
    precision = "fa2"
    o, _ = triton_forward(big, big, big, True, 0.125, precision)
    assert torch.equal(o[-1, -1], triton_forward(x, x, x, True, 0.125, precision)[0][0, 0])


@pytest.mark.parametrize(("length", "key_tile"), [(512, "full"), (1024, 512)])
def test_a_tile_as_long_as_the_row_is_the_row(length, key_tile):
    """Compiled as such, without an accumulator beside P̄V."""
    A = arithmetics("official", 1, length, 64, True, 0.125, torch.bfloat16)
    tiled, _ = forward_tiles(A, length, ROOMY)
    assert tiled.of[0].P.key_tile == key_tile


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
    assert len(used) == 18
    assert max(used) <= shared
