"""Filters raw stories for training: by length, repetition, rare words and near duplicates."""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

MIN_WORDS, MAX_WORDS = 60, 200
MIN_WRITTEN = 8  # words of a story by SmolLM2
MIN_COUNT = 12  # a story with a word that fewer stories have is dropped
MAX_REPEATED = 0.12  # share of a story's word trigrams that repeat an earlier one
SHINGLE = 6  # words
BANDS, ROWS = 5, 4  # MinHash: two stories that share 80% of their shingles agree in a band with probability 0.93
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def read(folder: Path) -> list[dict]:
    """The records of every stories-*.jsonl.gz. A truncated file is read up to the break."""
    records = []
    for path in sorted(folder.glob("stories-*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            try:
                for line in file:
                    record = json.loads(line)
                    if record["written"] >= MIN_WRITTEN:
                        records.append(record)
            except (EOFError, json.JSONDecodeError) as error:
                print(f"{path.name}: {error}; the rest of the file is skipped", flush=True)
    return records


def repeated_trigrams(words: Sequence[str]) -> float:
    """The share of a text's word trigrams that repeat an earlier one."""
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(trigrams)) / max(len(trigrams), 1)


def _profile(text: str) -> tuple[bool, frozenset[str], list[bytes]]:
    """(whether length and repetition are fine, the words, a key for each MinHash band)."""
    words = WORD.findall(text.lower())
    fine = MIN_WORDS <= len(words) <= MAX_WORDS and repeated_trigrams(words) <= MAX_REPEATED
    if not fine:
        return False, frozenset(), []
    shingles = {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
    hashes = np.array([zlib.crc32(s.encode()) for s in shingles], dtype=np.uint64)
    rng = np.random.default_rng(0)
    factors, offsets = rng.integers(1, 2**31, (2, BANDS * ROWS, 1), dtype=np.uint64)
    minima = ((hashes * factors + offsets) % np.uint64(2**31 - 1)).min(1).reshape(BANDS, ROWS)
    return True, frozenset(words), [bytes([band]) + row.tobytes() for band, row in enumerate(minima)]


def clean(texts: Sequence[str], workers: int = 16, min_count: int = MIN_COUNT) -> tuple[list[str], dict[str, int]]:
    """The stories that pass all filters, in an order that depends only on their texts, and how many each filter dropped."""
    with ProcessPoolExecutor(workers) as pool:
        profiles = list(pool.map(_profile, texts, chunksize=512))
    counts = Counter(word for _, words, _ in profiles for word in words)
    dropped = dict.fromkeys(("length or repetition", "rare words", "near duplicates"), 0)
    kept, seen = [], set()
    order = sorted(range(len(texts)), key=lambda i: hashlib.sha256(texts[i].encode()).digest())
    for i in order:
        fine, words, bands = profiles[i]
        if not fine:
            dropped["length or repetition"] += 1
        elif any(counts[word] < min_count for word in words):
            dropped["rare words"] += 1
        elif not seen.isdisjoint(bands):
            dropped["near duplicates"] += 1
        else:
            kept.append(texts[i])
            seen.update(bands)
    return kept, dropped
