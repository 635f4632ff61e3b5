"""Step of the explosion against mantissa bits of O, 3 to BF16's 7; tiles of 512 keys.

Expected, from runs of seed 0 in one tile (4 bits exploded at 1,390, 5 at 1,814; 6 did not within
2,500, but the W_Q of one layer had grown to 10, with fa2 to 2): 6 bits between 3,000 and 6,000, 7
between 5,000 and 10,000 or not at all. With a consistent δ, or without rounding on the way, never.
Came, of seed 0: 6 bits at 2,576, 7 bits at 8,937.
"""

base = "configs/fast_gpu.py"
flags = ["--max_iters=10000"]
arms = {f"{n} bits": [f"--precision=official,mantissa_bits={n}"] for n in (3, 4, 5, 6, 7)}
arms |= {
    "3 bits, δ consistent": ["--precision=official,mantissa_bits=3,delta=dp_p"],
    "FP32 accumulation": ["--precision=fa2"],
}
seeds = [0, 1]
