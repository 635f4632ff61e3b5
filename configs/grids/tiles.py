"""The fixes against the logical tile: original, paper's (β 2, 4, 7), bounded, in true BF16.

Expected: no explosion within 6,000 steps in tiles of 512 keys or one tile (none in 2,000 before);
in tiles of 128 a rise near 5,000, from one run of an older kernel.
"""

base = "configs/fast_bf16.py"


def _arms(arithmetic: str, tiles: tuple) -> dict[str, list[str]]:
    fixes = {
        "original": "stable=off",
        "paper's fix, β 2": "stable=paper,beta=2",
        "paper's fix, β 4": "stable=paper,beta=4",
        "paper's fix, β 7": "stable=paper,beta=7",
        "bounded shift": "stable=bounded",
    }
    return {
        f"{name} | {tile}": [f"--precision={arithmetic},key_tile={tile},{fix}"]
        for name, fix in fixes.items()
        for tile in tiles
    }


arms = _arms("official", (128, 512, "full"))
seeds = [0, 1]
