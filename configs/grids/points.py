"""Which rounding point kills a run: each alone, and all but it; O has 5 mantissa bits.

"In BF16" is 5 bits for P̄V, the accumulator and O, and BF16 itself for the others.

Expected: alone, none explodes; with one in FP32 all do but with O or δ in FP32, as on a CPU with 2
bits, where it takes P̄V and O. The paper's account, in which P̄V is what kills, would be refuted by
an explosion with P̄V alone in FP32. Should S in FP32 hold, what kills is not the drift of W_Q as
such, but what rounding makes of scores in the thousands.
"""

base = "configs/fast_gpu.py"


def _arms(none: str, all_: str) -> dict[str, list[str]]:
    points = ["scores", "row_max", "row_sum", "pv", "accumulator", "output", "dp"]
    arms = {f"{point} | alone in BF16": [f"--precision={none},{point}=bf16"] for point in points}
    arms |= {f"{point} | alone in FP32": [f"--precision={all_},{point}=fp32"] for point in points}
    return arms | {
        "δ | alone in FP32": [f"--precision={all_},delta=o_fp32"],
        "none | alone in BF16": [f"--precision={none}"],
        "none | alone in FP32": [f"--precision={all_}"],
    }


arms = _arms("fa2,key_tile=512,output=fp32,mantissa_bits=5", "official,mantissa_bits=5")
seeds = [0, 1]
