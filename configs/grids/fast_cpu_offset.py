"""Which error of δ kills a run on two CPU cores: its size, its mean, or that rounding makes it?

First expected: noise of δ alone, as of elements of O that are off at random by 7 or 14 % (two
roundings to 2 bits are about 7 %), explodes, 2 and 3.5 % do not; the error's size from row to row
would be refuted as the cause by 14 % that trains. It did train.

Then expected: what kills is a δ that is too large on average. O's error e changes dO by H e, H the
second derivative of the loss, so that δ = rowsum(dO ∘ O) has the term eᵀHe, positive on average,
even where e is not biased. In the original it is 0.10 ± 0.02 % of δ's RMS, about 0.2 % of the unit
of `delta_offset`. So an offset in FP32 arithmetic explodes if it is positive, 0.25 % included, and
not if it is negative. Stochastic rounding in the forward pass with as much noise in δ, but
independent of it, does not explode; nor the original with an offset of −0.25 %. After two seeds, in
which a negative offset did explode, three were added, and stochastic rounding as it is.
"""

base = "configs/fast_cpu.py"
_coarse = "paper,mantissa_bits=2"
_exact = "fa2,key_tile=full,output=fp32"
arms = {
    f"FP32, O in δ off by ±{percent:g} %": [f"--precision={_exact},delta_noise={percent / 100}"]
    for percent in (2, 3.5, 7, 14)
}
arms |= {
    f"FP32, offset of δ {percent:+g} %": [f"--precision={_exact},delta_offset={percent / 100}"]
    for percent in (0.25, -0.25, 1, -1, 4, -4)
}
arms |= {
    "stochastic": [f"--precision={_coarse},rounding=stochastic"],
    "stochastic, δ's error independent": [
        f"--precision={_coarse},rounding=stochastic,delta=o_fp32,delta_noise=0.07"
    ],
    "original, offset of δ -0.25 %": [f"--precision={_coarse},delta_offset=-0.0025"],
}
seeds = [0, 1, 2, 3, 4]
compare = [
    ("stochastic", "stochastic, δ's error independent"),
    ("FP32, offset of δ +0.25 %", "FP32, O in δ off by ±7 %"),
]
