"""Which rounding point kills a run: each alone, and all but it; O has 5 mantissa bits.

"In BF16" is 5 bits for P̄V, the accumulator and O, and BF16 itself for the others. What makes an
error add up in BF16, S together with the rounding of P̄ as an operand, stands for itself.

Expected: alone, none explodes; with one in FP32 all do but with O or δ in FP32, as on a CPU with 2
bits, where it takes P̄V and O; S and P̄, far finer than 5 bits, do not matter, nor what l sums. The
paper's account, in which P̄V is what kills, would be refuted by an explosion with P̄V alone in FP32.
Should S in FP32 hold, what kills is not the drift of W_Q as such, but what rounding makes of scores
in the thousands.
"""

base = "configs/fast_gpu.py"


def _arms(none: str, all_: str) -> dict[str, list[str]]:
    points = ["scores", "row_max", "p_operand", "row_sum", "pv", "accumulator", "output", "dp"]
    arms = {
        f"{' and '.join(names)} | alone in {kind.upper()}": [
            ",".join([f"--precision={rest}", *(f"{name}={kind}" for name in names)])
        ]
        for rest, kind in ((none, "bf16"), (all_, "fp32"))
        for names in (*([point] for point in points), ["scores", "p_operand"])
    }
    return arms | {
        "δ | alone in FP32": [f"--precision={all_},delta=o_fp32"],
        "none | alone in BF16": [f"--precision={none}"],
        "none | alone in FP32": [f"--precision={all_}"],
        "none, l of the rounded P̄ | alone in FP32": [f"--precision={all_},p_sum=bf16"],
    }


_none = "fa2,key_tile=512,p_operand=fp32,output=fp32,mantissa_bits=5"
arms = _arms(_none, "official,mantissa_bits=5")
seeds = [0, 1]
