"""What every attention kernel agrees on. Plain numbers: this file imports neither PyTorch nor Triton."""

# Cached tokens in a KV split. Decode attention reads each split in one program and combines the splits of a sequence in order.
# The number is constant, whatever the batch, so no batch changes a bit of another sequence's result. `partial` cuts long contexts
# at multiples of it.
KV_SPLIT = 256
HEAD_DIMS = (64, 128)  # channels of a head
MAX_GROUP = 16  # query heads that share a KV head
