"""The failure and what holds, for scripts/quickstart.sh: one seed of configs/grids/fast_cpu.py."""

base = "configs/fast_cpu.py"
arms = {
    "original": ["--precision=paper,mantissa_bits=2"],
    "stabilized (paper's fix)": [
        "--precision=paper,mantissa_bits=2,stable=paper,row_sum_floor=1e-10"
    ],
    "original, δ consistent": ["--precision=paper,mantissa_bits=2,delta=dp_p"],
    "control (SDPA)": ["--attention=sdpa"],
}
