"""Which rounding point kills a run on two CPU cores: each alone, and all but it; O has 2 bits.

Expected: alone, the points of O explode, others do not; of those alone in FP32 only δ holds.
Came: alone none explodes; it takes P̄V and O, so that O alone in FP32 holds as well as δ.
"""

from configs.grids.points import _arms

base = "configs/fast_cpu.py"
arms = _arms(
    "fa2,key_tile=full,p_operand=fp32,output=fp32,mantissa_bits=2", "paper,mantissa_bits=2"
)
seeds = [0, 1]
