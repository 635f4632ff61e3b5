"""The loss explosion on two CPU cores in a minute and a half: O has 2 mantissa bits, BF16 has 7.

49,000 parameters, bytes, 1,024 tokens a step. The original arithmetic explodes between steps 1,800
and 3,000; with the paper's fix the loss rises; with a δ that agrees with P and dP, and with the
FP32 control, it does not. A format as coarse shows what the size of the error does, not its bias.
"""

out_dir = "out/fast_cpu"
dataset = "pysource"
attention = "flash"
precision = "paper,mantissa_bits=2"
device = "cpu"
compile = False

# 8 sequences · 128 bytes = 1,024 tokens a step
batch_size = 8
gradient_accumulation_steps = 1
block_size = 128

n_layer = 3
n_head = 1
n_embd = 32

learning_rate = 1.5e-2
min_lr = 1e-5
warmup_iters = 100
max_iters = 3500
lr_decay_iters = 600000
weight_decay = 0.0
seed = 0

eval_interval = 500
eval_iters = 20
log_interval = 10
stop_on_explosion = True
log_attention = True
always_save_checkpoint = False
