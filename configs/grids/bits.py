"""Step of the explosion against mantissa bits of O: does the trend reach BF16's 7?

Expected: later by half or more for each bit, none within these steps at 7; consistent δ never.
"""

base = "configs/fast_coarse.py"
flags = ["--max_iters=5000"]
arms = {
    f"{bits} bits | {delta}": [f"--precision=paper,mantissa_bits={bits},delta={delta}"]
    for bits in (3, 4, 5, 6, 7)
    for delta in ("o", "dp_p")
}
seeds = [0, 1]
