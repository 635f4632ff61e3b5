"""Does the original arithmetic explode, and what holds? 5 mantissa bits for O; five seeds.

Expected: original (in an unrecorded run it rose at step 1,755), paper's fix and bounded shift (in
another, 1,710) explode, consistent δ and control do not. An explosion with consistent δ would
refute that δ is what kills; an original that trains like the control, the paper's account here.
"""

base = "configs/fast_coarse.py"
arms = {
    "original": ["--precision=paper,mantissa_bits=5"],
    "paper's fix": ["--precision=paper,mantissa_bits=5,stable=paper,row_sum_floor=1e-10"],
    "bounded shift": ["--precision=paper,mantissa_bits=5,stable=bounded"],
    "δ consistent": ["--precision=paper,mantissa_bits=5,delta=dp_p"],
    "control (O in FP32)": ["--precision=paper,row_sum=fp32,pv=fp32,accumulator=fp32,output=fp32"],
}
seeds = [0, 1, 2, 3, 4]
compare = [
    ("original", "control (O in FP32)"),
    ("original", "δ consistent"),
    ("original", "paper's fix"),
    ("original", "bounded shift"),
]
