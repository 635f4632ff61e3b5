"""Each rounding point by inputs on which it alone decides the result, bit for bit.

Scores are such that every P̄ is 1, or underflows to 0, and that sums are exact in any order. BF16
has 8 significant bits: 257 becomes 256, between 32,768 and 65,536 only multiples of 256 exist.
"""

import pytest
import torch
from attention_cases import kernel_with_gradients, reference_with_gradients

pytest.importorskip("triton")

from attention_reference import reference_forward
from flash_attn_stable import triton_forward
from precision import ROUNDING_POINTS

D, TILE = 16, 16
EXACT = f"fa2,output=fp32,p_operand=fp32,key_tile={TILE}"  # every point in FP32
GONE = -200.0  # a score whose P̄ is 0 beside one of 0


def rows(keys: dict[int, tuple[float, float]], values: dict[int, float], T=4 * TILE, device="cpu"):
    """q, k, v [1, 1, T, D]: every query scores key j with the sum of keys[j] and sees values[j]."""
    q, k, v = (torch.zeros(1, 1, T, D) for _ in range(3))
    q[..., :2] = 1
    k[..., 0] = GONE
    for j, score in keys.items():
        k[..., j, :2] = torch.tensor(score)
    for j, value in values.items():
        v[..., j, :] = value
    return [x.bfloat16().to(device) for x in (q, k, v)]


def none(*positions):
    return dict.fromkeys(positions, (0.0, 0.0))


FORWARD = {
    # 65,536 − 128 becomes 65,536 and ties with the maximum: O is 2 instead of 1
    "scores": (rows, {0: (65536, 0), 1: (65536, -128)}, {0: 1, 1: 3}),
    # the paper's fix shifts by 65,536 + 256: the row underflows, but not if that becomes 65,536
    "row_max": (rows, {0: (65536, 0), 1: (65536, 0)}, {0: 1, 1: 1}),
    # tile 1 adds 256 + 1 to −1
    "pv": (rows, none(0, 16, 17, 18), {0: -1, 16: 256, 17: 1}),
    # 256 + 1 − 1, a tile each
    "accumulator": (rows, none(0, 16, 32, 33), {0: 256, 16: 1, 32: -1}),
    # 1/3
    "output": (rows, none(0, 1, 2), {0: 1}),
}


FIX = {"row_max": f",stable=paper,beta={257 / 256}"}  # where a point's inputs need one


def both(inputs, arithmetic, device, seed=None):
    """O by kernel and by reference, which must be the same bits."""
    options = (False, 1.0, arithmetic, seed)
    o, lse = triton_forward(*inputs, *options)
    o_reference, lse_reference = reference_forward(*inputs, *options)
    assert torch.equal(o.nan_to_num(-1), o_reference.nan_to_num(-1)), arithmetic
    torch.testing.assert_close(lse, lse_reference, rtol=1e-6, atol=1e-6, equal_nan=True)
    return o.float().nan_to_num(-1), lse.nan_to_num(-1)


@pytest.mark.parametrize("point", FORWARD)
def test_only_this_point_changes_o(point, device):
    make, keys, values = FORWARD[point]
    inputs = make(keys, values, device=device)
    arithmetic = EXACT + FIX.get(point, "")
    exact, _ = both(inputs, arithmetic, device)
    for other in ROUNDING_POINTS:
        o, _ = both(inputs, f"{arithmetic},{other}=bf16", device)
        assert torch.equal(o, exact) == (other != point), other


def test_only_the_row_sum_changes_lse(device):
    """257 maxima in two tiles: log 256 instead of log 257. V is 0, so O is."""
    inputs = rows(none(*range(257)), {}, T=272, device=device)
    exact = f"{EXACT},key_tile=full"
    _, lse = both(inputs, exact, device)
    for other in ROUNDING_POINTS:
        _, changed = both(inputs, f"{exact},{other}=bf16", device)
        assert torch.equal(changed, lse) == (other != "row_sum"), other


@pytest.mark.parametrize("tile", [16, "full"])
@pytest.mark.parametrize("p_sum", ["fp32", "bf16"])
@pytest.mark.parametrize("p_operand", ["fp32", "bf16"])
def test_p_is_rounded_as_operand_and_as_summand(p_operand, p_sum, tile, device):
    """P̄ is 1 and e⁻¹, V is 0 and 1: O = P̄ / (1 + P̄), above and below rounded or not."""
    inputs = rows({0: (0, 0), 1: (0, -1)}, {1: 1}, T=256, device=device)
    p = {"fp32": torch.tensor(-1.0).exp(), "bf16": torch.tensor(-1.0).exp().bfloat16().float()}
    text = f"{EXACT},key_tile={tile},p_operand={p_operand},p_sum={p_sum}"
    expected = torch.full((256, D), (p[p_operand] / (1 + p[p_sum])).item(), device=device)
    for forward in (triton_forward, reference_forward):
        o, lse = forward(*inputs, False, 1.0, text)
        torch.testing.assert_close(o[0, 0], expected, rtol=2e-5, atol=0)
        torch.testing.assert_close(lse.exp2().mean().cpu(), 1 + p[p_sum], rtol=1e-6, atol=0)


def test_only_dp_changes_gradients(device):
    """One key with dP = δ = 257: dS is 0, but −1 with dP = 256."""
    q, k, v = rows({0: (0, 0)}, {}, device=device)
    v[..., 0, 0], v[..., 0, 1] = 256, 1
    do = torch.zeros_like(q)
    do[..., :2] = 1
    exact = kernel_with_gradients(q, k, v, do, False, 1.0, EXACT)
    for other in ROUNDING_POINTS:
        arithmetic = f"{EXACT},{other}=bf16"
        ours = kernel_with_gradients(q, k, v, do, False, 1.0, arithmetic)
        reference = reference_with_gradients(q, k, v, do, False, 1.0, arithmetic)
        assert all(map(torch.equal, ours, reference))
        assert torch.equal(ours[2], exact[2]) == (other != "dp"), other
    assert (exact[2] == 0).all()


@pytest.mark.parametrize("delta", ["o", "o_fp32", "dp_p"])
def test_delta_is_that_of_its_o(delta, device):
    """P̄V = 257 over 4 keys: O is 64.25, 64 in BF16. δ sees one or the other."""
    q, k, v = rows(none(0, 1, 2, 3), {0: 256, 1: 1}, device=device)
    do = torch.ones_like(q)
    arithmetic = f"{EXACT},output=bf16,delta={delta}"
    *_, ours = kernel_with_gradients(q, k, v, do, False, 1.0, arithmetic)
    *_, reference = reference_with_gradients(q, k, v, do, False, 1.0, arithmetic)
    expected = D * (64 if delta == "o" else 64.25)
    torch.testing.assert_close(ours, torch.full_like(ours, expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_mantissa_bits(bits, device):
    """1 and `bits` bits: 2^(bits + 1) + 1 loses its last one, 2^bits + 1 does not."""
    for value, kept in ((2**bits + 1, 2**bits + 1), (2 ** (bits + 1) + 1, 2 ** (bits + 1))):
        inputs = rows(none(0, 1), {0: value - 1, 1: 1}, device=device)
        arithmetic = f"{EXACT},pv=bf16,mantissa_bits={bits}"
        o, _ = both(inputs, arithmetic, device)
        assert (o * 2 == kept).all()


@pytest.mark.parametrize(("tile", "expected"), [(16, 255), (32, 255), (48, 256), ("full", 256)])
def test_roundings_stand_where_logical_tiles_end(tile, expected, device):
    """256 + 1 − 1: the 1 is lost where a tile ends before −1 comes."""
    inputs = rows(none(0, 16, 32, 33), {0: 256, 16: 1, 32: -1}, device=device)
    o, _ = both(inputs, f"{EXACT},accumulator=bf16,pv=bf16,key_tile={tile}", device)
    assert (o * 4 == expected).all()


def test_stochastic_rounding_touches_the_points_of_o_alone(device):
    """S, m and l round to nearest whatever `rounding` is: nothing is drawn without a point of O."""
    inputs = rows({0: (65536, 0), 1: (65536, -128)}, {0: 1, 1: 3}, device=device)
    text = f"{EXACT},scores=bf16,row_max=bf16,row_sum=bf16"
    nearest, _ = both(inputs, text, device)
    stochastic, _ = both(inputs, text + ",rounding=stochastic", device)
    assert torch.equal(nearest, stochastic)
