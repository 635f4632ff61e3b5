"""Bias, size, consistency, low rank: what of the paper's chain is needed? Tiles of 16 keys, BF16.

Expected: stochastic rounding of O explodes as the nearest does, since the row sum, which it leaves
as it is, makes the error; δ from O in FP32 holds; δ off by as much as the original's (0.2 % in
common) trains; the original holds with QK-norm, which bounds what W_Q can do.
Bias of O is refuted as needed by the first, low rank by the last exploding.
"""

base = "configs/fast_bf16.py"
_official = "official,key_tile=16"
_exact = "fa2,key_tile=16,output=fp32"
arms = {
    "original": [f"--precision={_official}"],
    "original, O rounded stochastically": [f"--precision={_official},rounding=stochastic"],
    "original, δ from O in FP32": [f"--precision={_official},delta=o_fp32"],
    "original, bounded shift": [f"--precision={_official},stable=bounded"],
    "original, QK-norm": [f"--precision={_official}", "--qk_norm=True"],
    "FP32": [f"--precision={_exact}"],
}
arms |= {
    f"FP32, δ off by {percent:+g} %": [f"--precision={_exact},delta_error={percent / 100}"]
    for percent in (0.2, -0.2, 1, -1)
}
seeds = [0, 1]
