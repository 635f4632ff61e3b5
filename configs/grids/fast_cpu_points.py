"""Which rounding point kills a run on two CPU cores: each alone, and all but it; O has 2 bits.

Expected as in configs/grids/points.py: alone, the points of O explode, others do not; of those
alone in FP32 only δ holds.
"""

from configs.grids.points import arms as _arms

base = "configs/fast_cpu.py"
arms = {
    name: [flag.replace("mantissa_bits=5", "mantissa_bits=2") for flag in flags]
    for name, flags in _arms.items()
}
seeds = [0, 1]
