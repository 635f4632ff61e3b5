"""Which rounding point kills a run: each alone in BF16, each alone in FP32. O: 5 mantissa bits.

Expected: of the points alone in BF16 only those of O explode; of those alone in FP32, δ holds. The
paper's account would be refuted here by points of O that train like none, or by S, m, l or dP alone
that explode.
"""

base = "configs/fast_coarse.py"
_points = ["scores", "row_max", "row_sum", "pv", "accumulator", "output", "dp"]
_none = "fa2,key_tile=full,output=fp32,mantissa_bits=5"
_all = "paper,mantissa_bits=5"
arms = {f"{point} | alone in BF16": [f"--precision={_none},{point}=bf16"] for point in _points}
arms |= {f"{point} | alone in FP32": [f"--precision={_all},{point}=fp32"] for point in _points}
arms |= {
    "δ | alone in FP32": [f"--precision={_all},delta=o_fp32"],
    "none | alone in BF16": [f"--precision={_none}"],
    "none | alone in FP32": [f"--precision={_all}"],
}
seeds = [0, 1]
