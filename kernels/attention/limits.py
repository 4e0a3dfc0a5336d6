"""What every attention kernel agrees on. Plain values: this file imports neither PyTorch nor Triton."""

from minirt.kernels.regimes import AttentionLimits

# Cached tokens in a KV split. In decode attention, one program reads a split, and the splits of a sequence are combined in order.
# The size does not depend on the batch, so a sequence's result does not depend on the other sequences. `partial` divides long
# contexts at multiples of it.
KV_SPLIT = 256
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)  # channels of a head
# FP8 pages of at most this many tokens, of all sequences of a step together and rounded up to KV splits, are copied to 16 bits
# for the attention of prompts. The copies take 0.5 GB with Llama-3.1-8B.
MAX_WIDENED_TOKENS = 131_072
MAX_GROUP = 16  # query heads that share a KV head
FORMATS = ("fp16", "fp32", "fp8", "fp8_fp32")  # of KV pages, see `regimes.AttentionLimits`
# What all kernels of attention take. Their checks of arguments follow it.
ANY = AttentionLimits(FORMATS, HEAD_DIMS, raw=False, page_size=16, group=MAX_GROUP)
