"""A GPT of 0.9M parameters on the sources of Python's standard library, byte by byte.

scripts/quickstart.sh runs it with the original, the stabilized and the control attention, about two
minutes each on two cores. All three are expected to learn alike at this size and length.
"""

out_dir = "out/quickstart/original"
dataset = "pysource"
attention = "flash"
precision = "paper"
compile = False  # compiling would take longer than it saves

# 8 sequences · 256 bytes = 2,048 tokens a step
batch_size = 8
gradient_accumulation_steps = 1
block_size = 256

n_layer = 4
n_head = 4
n_embd = 128

learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 50
max_iters = 400
lr_decay_iters = 400
weight_decay = 0.1

eval_interval = 200
eval_iters = 20
log_interval = 10
