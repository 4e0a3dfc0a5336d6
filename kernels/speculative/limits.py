"""How many drafts a sequence may have, and how large n-gram matching may be. Imports nothing."""

MAX_DRAFTS = 7  # of a sequence: `attention.decode_few` computes at most one token and 7 drafts after it in one read of K and V
# Limits of n-gram matching, whose kernel packs the length of a match and its position into one integer of 31 bits.
LONGEST = 16  # tokens of a match, at most
MAX_HISTORY = 1 << 26  # tokens of a sequence, at most
