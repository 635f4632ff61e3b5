"""The fixes against the logical tile, on two CPU cores; O has 2 mantissa bits, a row 128 keys.

Expected: the error's size does not depend on the shift, so all explode or rise; shorter tiles,
which round O more often, earlier.
"""

from configs.grids.tiles import _arms

base = "configs/fast_cpu.py"
arms = _arms("paper,mantissa_bits=2", (16, 32, "full"))
seeds = [0, 1]
