"""Bias, size, consistency, low rank: what of the paper's chain is needed? Tiles of 16 keys, BF16.

Expected: stochastic rounding of O explodes as the nearest does, since the row sum, which it leaves
as it is, makes the error; δ from O in FP32 holds, also with noise as large as the original's error
(0.5 %), independent of the rounding; the original holds with QK-norm, which bounds what W_Q can do.
In FP32 arithmetic an offset of δ explodes if it is positive: 0.1 % sooner than the original, 0.01
%, which is about its mean error, as late or not within these steps; negative ones later or not.

Bias of O is refuted as needed by the first, low rank by an explosion with QK-norm, the account by
offset by a positive one of 0.1 % that trains.
"""

base = "configs/fast_bf16.py"
_official = "official,key_tile=16"
_exact = "fa2,key_tile=16,output=fp32"
arms = {
    "original": [f"--precision={_official}"],
    "original, O rounded stochastically": [f"--precision={_official},rounding=stochastic"],
    "original, δ from O in FP32": [f"--precision={_official},delta=o_fp32"],
    "original, δ's error independent": [f"--precision={_official},delta=o_fp32,delta_noise=0.005"],
    "original, bounded shift": [f"--precision={_official},stable=bounded"],
    "original, QK-norm": [f"--precision={_official}", "--qk_norm=True"],
    "FP32": [f"--precision={_exact}"],
}
arms |= {
    f"FP32, offset of δ {percent:+g} %": [f"--precision={_exact},delta_offset={percent / 100}"]
    for percent in (0.01, -0.01, 0.1, -0.1)
}
seeds = [0, 1]
