"""Step of the explosion against mantissa bits of O, 3 to BF16's 7; tiles of 16 keys.

Expected: sooner with fewer bits, from 3,500 at 7 to 1,500 at 4; with a consistent δ never.
"""

base = "configs/fast_bf16.py"
arms = {
    f"{bits} bits | {name}": [
        f"--precision=official,key_tile=16,mantissa_bits={bits},delta={delta}"
    ]
    for bits in (3, 4, 5, 6, 7)
    for name, delta in (("original", "o"), ("δ consistent", "dp_p"))
}
seeds = [0, 1]
