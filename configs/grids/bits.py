"""Step of the explosion against mantissa bits of O, 3 to BF16's 7; tiles of 16 keys.

Expected: sooner with fewer bits, from 3,500 at 7 to 1,500 at 4; with a consistent δ never.
"""

base = "configs/fast_bf16.py"


def _arms(arithmetic: str, bits: tuple[int, ...]) -> dict[str, list[str]]:
    return {
        f"{n} bits | {name}": [f"--precision={arithmetic},mantissa_bits={n},delta={delta}"]
        for n in bits
        for name, delta in (("original", "o"), ("δ consistent", "dp_p"))
    }


arms = _arms("official,key_tile=16", (3, 4, 5, 6, 7))
seeds = [0, 1]
