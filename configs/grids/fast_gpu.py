"""Does the original arithmetic explode on a GPU, and what holds? O has 5 bits; five seeds."""

base = "configs/fast_gpu.py"
_original = "official,mantissa_bits=5"
arms = {
    "original": [f"--precision={_original}"],
    "paper's fix": [f"--precision={_original},stable=paper"],
    "δ consistent": [f"--precision={_original},delta=dp_p"],
    "control (FP32 accumulation)": ["--precision=fa2"],
}
seeds = [0, 1, 2, 3, 4]
compare = [
    ("original", "control (FP32 accumulation)"),
    ("original", "δ consistent"),
    ("original", "paper's fix"),
]
