"""Does the original arithmetic explode on a CPU, and what holds? O has 2 bits; five seeds."""

base = "configs/fast_cpu.py"
arms = {
    "original": ["--precision=paper,mantissa_bits=2"],
    "paper's fix": ["--precision=paper,mantissa_bits=2,stable=paper,row_sum_floor=1e-10"],
    "δ consistent": ["--precision=paper,mantissa_bits=2,delta=dp_p"],
    "control (SDPA)": ["--attention=sdpa"],
}
seeds = [0, 1, 2, 3, 4]
compare = [("original", "control (SDPA)"), ("original", "δ consistent")]
