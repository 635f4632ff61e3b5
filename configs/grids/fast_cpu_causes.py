"""Bias, size, consistency, low rank: which of them kills a run on two CPU cores? O has 2 bits.

Expected: stochastic rounding (a larger error, no bias) explodes, as it rose on a GPU at 5 bits; δ
from O in FP32 holds, as a consistent δ does. An error of δ alone, in FP32 arithmetic, explodes if
it is −30 %, not if it is +30 %: at ±1 % on a GPU the largest score grew twice as fast with −
(unrecorded runs). Bias as the cause is refuted by the first, low rank by an original that explodes
with QK-norm. +0.3 % and +1 % were added when +3 % had exploded and −3 % had not.
"""

base = "configs/fast_cpu.py"
_coarse = "paper,mantissa_bits=2"
_exact = "fa2,key_tile=full,output=fp32"
arms = {
    "original": [f"--precision={_coarse}"],
    "stochastic": [f"--precision={_coarse},rounding=stochastic"],
    "δ from O in FP32": [f"--precision={_coarse},delta=o_fp32"],
    "FP32": [f"--precision={_exact}"],
}
arms |= {
    f"FP32, δ off by {percent:+g} %": [f"--precision={_exact},delta_error={percent / 100}"]
    for percent in (0.3, 1, 3, -3, 10, -10, 30, -30)
}
arms |= {
    "original, QK-norm": [f"--precision={_coarse}", "--qk_norm=True"],
    "FP32, QK-norm": [f"--precision={_exact}", "--qk_norm=True"],
}
seeds = [0, 1]
