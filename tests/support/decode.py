"""Helpers of the tests of attention, on 16-bit and on FP8 pages."""

import torch

from minirt.kernels.attention import combine, decode_few, decode_fp8_sm90, decode_sm90
from minirt.kernels.attention import decode as kernel
from minirt.kernels.launch import Workspace

LARGE = [
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": (128,), "split": 256},
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": (8001,), "split": 256},
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": tuple(range(0, 6400, 100)), "split": 512},
    {"Nq": 32, "Nkv": 8, "D": 64, "page_size": 16, "seq_lens": (131072, 1, 5000), "split": 256},
    {"Nq": 32, "Nkv": 8, "D": 128, "page_size": 32, "seq_lens": (256, 257, 0, 1) * 75, "split": 256},
    # Each program has many tiles, so loading runs far ahead. No tile may be overwritten before it has been read.
    {"Nq": 32, "Nkv": 32, "D": 64, "page_size": 64, "seq_lens": (3000,) * 24, "split": 256},
    {"Nq": 32, "Nkv": 32, "D": 128, "page_size": 64, "seq_lens": (128,) * 100, "split": 256},
]
# Lengths around the window, and windows that begin, or new tokens that lie, around edges of pages, of tiles and of KV splits.
WINDOWED = [
    {
        "Nq": 3, "Nkv": 1, "D": 64, "page_size": page_size, "split": split, "window": w,
        "seq_lens": (w - 1, w, w + 1, 2 * w, 0, w + 63, w + 64, 97, w + 255, w + 256, w + 257, 700)[:: 1 if w < 300 else 2],
    }
    for w in (1, 5, 64, 100, 300) for page_size, split in ((16, 64), (64, 256))
] + [{"Nq": 8, "Nkv": 2, "D": 128, "page_size": 64, "split": 64, "window": w, "seq_lens": (500,)} for w in (5, 100)]  # fmt: skip
SM_COUNTS = [1, 132]  # with 1, each program has many work items, or combines the KV splits of many heads


def use_sms(count, monkeypatch):
    for module in (kernel, combine, decode_few, decode_sm90, decode_fp8_sm90):
        monkeypatch.setattr(module, "sm_count", lambda device: count)


def decode64(q, k, v, scale, window=None):
    """Attention of one sequence in fp64: q [Nq, D], k, v [total, Nkv, D]."""
    k, v = (x[-(window or len(x)) :].double().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q.double(), k) * scale).softmax(-1), v)


def attention64(q, k, v, scale, window=None):
    """One sequence: q [n, Nq, D] are the last n of its tokens k, v [total, Nkv, D]."""
    n, total = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    age = torch.arange(total - n, total, device=q.device).unsqueeze(1) - torch.arange(total, device=q.device)
    hidden = (age < 0) | (age >= (window or total))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def forget(pages, lens, new, window):
    """Block tables for a kernel. With a window, NaN takes the place of the tokens (and scales) that no new token sees, and an
    unused page, which is NaN, that of the pages which have only such tokens. `clean` copies, keys and values stay."""
    tables = pages.tables.clone()
    stored = list(pages.pages.values()) if hasattr(pages, "pages") else [pages.k, pages.v]
    size = stored[0].shape[1]
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        oldest = 0 if window is None else max(0, n - m - window + 1)
        t = torch.arange(oldest, device=tables.device)
        slots = pages.tables[b][t // size].long() * size + t % size
        for x in stored:
            if x.element_size() == 1:
                x.view(torch.uint8).flatten(0, 1)[slots] = 0x7F  # NaN
            else:
                x.flatten(0, 1)[slots] = torch.nan
        tables[b, : oldest // size] = pages.tables[b, -1]
    return tables


def plan(lens, split, Nq, D, device, spare=0, window=None, new=None):
    """split_starts, max_splits, and a workspace filled with NaN, so that a read of an unwritten value is noticed."""
    starts = kernel.splits_before(lens, split, window, new)
    most = starts[-1] + spare
    workspace = Workspace(device, num_floats=kernel.workspace_floats(most, Nq, D))
    workspace.sums(0).fill_(float("nan"))
    return torch.tensor(starts, dtype=torch.int32, device=device), most, workspace
