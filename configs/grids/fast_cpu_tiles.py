"""The fixes against the logical tile, on two CPU cores; O has 2 mantissa bits, a row 128 keys.

Expected: the error's size does not depend on the shift, so all explode or rise; shorter tiles,
which round O more often, earlier.
"""

base = "configs/fast_cpu.py"
_fixes = {
    "original": "stable=off",
    "paper's fix, β 2": "stable=paper,beta=2",
    "paper's fix, β 4": "stable=paper,beta=4",
    "paper's fix, β 7": "stable=paper,beta=7",
    "bounded shift": "stable=bounded",
}
arms = {
    f"{name} | {tile}": [f"--precision=paper,mantissa_bits=2,key_tile={tile},{fix}"]
    for name, fix in _fixes.items()
    for tile in (16, 32, "full")
}
seeds = [0, 1]
