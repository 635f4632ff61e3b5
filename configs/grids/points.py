"""Which rounding point kills a run: each alone in BF16 and each alone in FP32. Tiles of 16 keys.

Expected, from single runs: alone in BF16, the row sum rises or explodes, and no other; alone in
FP32, the row sum holds, and δ. The paper's account, in which P̄V is what kills, would be refuted
here by an explosion with P̄V alone in FP32 and none with P̄V alone in BF16.
"""

base = "configs/fast_bf16.py"


def _arms(none: str, all_: str) -> dict[str, list[str]]:
    points = ["scores", "row_max", "row_sum", "pv", "accumulator", "output", "dp"]
    arms = {f"{point} | alone in BF16": [f"--precision={none},{point}=bf16"] for point in points}
    arms |= {f"{point} | alone in FP32": [f"--precision={all_},{point}=fp32"] for point in points}
    return arms | {
        "δ | alone in FP32": [f"--precision={all_},delta=o_fp32"],
        "none | alone in BF16": [f"--precision={none}"],
        "none | alone in FP32": [f"--precision={all_}"],
    }


arms = _arms("fa2,key_tile=16,output=fp32", "official,key_tile=16")
seeds = [0, 1]
