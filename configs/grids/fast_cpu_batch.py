"""With a larger batch, 8,192 tokens a step instead of 1,024, do 3 mantissa bits explode on a CPU?

Expected, from one run of seed 0: yes, near step 1,900, where with 1,024 tokens they do not within
5,000: a larger batch has less noise to hide what the rounding does to the gradient on average. The
fix rises, a consistent δ and the control do not.
"""

base = "configs/fast_cpu.py"
flags = ["--batch_size=64", "--micro_batch_size=32", "--max_iters=2500"]
_original = "paper,mantissa_bits=3"
arms = {
    "original": [f"--precision={_original}"],
    "control (FP32 accumulation)": ["--precision=fa2"],
    "δ consistent": [f"--precision={_original},delta=dp_p"],
    "paper's fix": [f"--precision={_original},stable=paper,row_sum_floor=1e-10"],
}
seeds = [0, 1, 2]
compare = [("original", "control (FP32 accumulation)"), ("original", "δ consistent")]
