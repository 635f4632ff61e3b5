"""The fixes against the logical tile: original, paper's (β 2, 4, 7), bounded. O: 5 bits.

Expected: all explode, as the size of the error does not depend on the shift; shorter tiles, which
round O more often, earlier.
"""

base = "configs/fast_coarse.py"
_fixes = {
    "original": "stable=off",
    "paper's fix, β 2": "stable=paper,beta=2",
    "paper's fix, β 4": "stable=paper,beta=4",
    "paper's fix, β 7": "stable=paper,beta=7",
    "bounded": "stable=bounded",
}
arms = {
    f"{name} | {tile}": [f"--precision=official,mantissa_bits=5,key_tile={tile},{fix}"]
    for name, fix in _fixes.items()
    for tile in (128, 512, "full")
}
seeds = [0, 1]
