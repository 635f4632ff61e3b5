"""Does the original arithmetic explode in true BF16, and what holds? Five seeds.

Expected, from single runs of seed 0: the original explodes in most seeds, between 3,000 and 6,000;
the others in none; with the fix the loss falls more slowly, by 0.1 to 0.2 at step 2,000.

The paper's account would be refuted here by an original that trains like the control in most
seeds, by a fix that explodes or rises as the original does, or by a control that does. That δ is
what kills would be refuted by a consistent δ that explodes or rises: its O is as biased as the
original's.
"""

base = "configs/fast_bf16.py"
_official = "official,key_tile=16"
arms = {
    "original": [f"--precision={_official}"],
    "paper's fix": [f"--precision={_official},stable=paper"],
    "δ consistent": [f"--precision={_official},delta=dp_p"],
    "control (FP32 accumulation)": [
        f"--precision={_official},row_sum=fp32,pv=fp32,accumulator=fp32"
    ],
}
seeds = [0, 1, 2, 3, 4]
compare = [
    ("original", "control (FP32 accumulation)"),
    ("original", "δ consistent"),
    ("original", "paper's fix"),
]
