"""Step of the explosion against mantissa bits of O, on two CPU cores: does it reach BF16's 7?

Expected: two bits explode at 2,500; three later or not within 5,000 steps; more never, nor any
with a consistent δ. A trend would then rest on one point, and say nothing of 7 bits.
"""

base = "configs/fast_cpu.py"
flags = ["--max_iters=5000"]


def _arms(arithmetic: str, bits: tuple[int, ...]) -> dict[str, list[str]]:
    return {
        f"{n} bits | {name}": [f"--precision={arithmetic},mantissa_bits={n},delta={delta}"]
        for n in bits
        for name, delta in (("original", "o"), ("δ consistent", "dp_p"))
    }


arms = _arms("paper", (2, 3, 4, 5, 7))
seeds = [0, 1]
