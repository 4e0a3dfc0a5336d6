"""How large n-gram matching may be: the kernel packs the length of a match and its place into 31 bits. Imports nothing."""

LONGEST = 16  # tokens of a match, at most
MAX_HISTORY = 1 << 26  # tokens of a sequence, at most
