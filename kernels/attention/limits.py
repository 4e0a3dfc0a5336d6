"""What every attention kernel agrees on. Plain numbers: this file imports neither PyTorch nor Triton."""

# Cached tokens in a KV split. In decode attention, one program reads a split, and the splits of a sequence are combined in order.
# The size does not depend on the batch, so a sequence's result does not depend on the other sequences. `partial` divides long
# contexts at multiples of it.
KV_SPLIT = 256
HEAD_DIMS = (64, 128)  # channels of a head
MAX_GROUP = 16  # query heads that share a KV head
