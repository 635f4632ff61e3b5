"""Step of the explosion against mantissa bits of O, on two CPU cores: does it reach BF16's 7?

Expected: two bits explode at 2,500; three later or not within 5,000 steps; more never, nor any
with a consistent δ. A trend would then rest on one point, and say nothing of 7 bits.
"""

from configs.grids.bits import _arms

base = "configs/fast_cpu.py"
flags = ["--max_iters=5000"]
arms = _arms("paper", (2, 3, 4, 5, 7))
seeds = [0, 1]
