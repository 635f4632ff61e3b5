"""Bias, size, consistency, low rank: what of the paper's chain is needed. O: 5 mantissa bits.

Bias is refuted as needed if stochastic rounding explodes (an unrecorded run rose at 1,479), and as
enough if δ off by 1 % trains. Low rank is refuted as needed if QK-norm does not stop the original.
"""

base = "configs/fast_coarse.py"
_coarse = "paper,mantissa_bits=5"
_exact = "fa2,key_tile=full,output=fp32"
arms = {
    "original": [f"--precision={_coarse}"],
    "no bias, larger error: stochastic": [f"--precision={_coarse},rounding=stochastic"],
    "O as it is, δ consistent: dP·P": [f"--precision={_coarse},delta=dp_p"],
    "O as it is, δ from O in FP32": [f"--precision={_coarse},delta=o_fp32"],
    "FP32, δ off by +1 %": [f"--precision={_exact},delta_error=0.01"],
    "FP32, δ off by −1 %": [f"--precision={_exact},delta_error=-0.01"],
    "FP32, δ off by +0.2 %": [f"--precision={_exact},delta_error=0.002"],
    "FP32, δ off by −0.2 %": [f"--precision={_exact},delta_error=-0.002"],
    "original, QK-norm": [f"--precision={_coarse}", "--qk_norm=True"],
    "FP32, QK-norm": [f"--precision={_exact}", "--qk_norm=True"],
}
seeds = [0, 1]
compare = [("original", "O as it is, δ consistent: dP·P")]
