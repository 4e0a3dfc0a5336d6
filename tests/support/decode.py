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
SM_COUNTS = [1, 132]  # with 1, each program has many work items, or combines the KV splits of many heads


def use_sms(count, monkeypatch):
    for module in (kernel, combine, decode_few, decode_sm90, decode_fp8_sm90):
        monkeypatch.setattr(module, "sm_count", lambda device: count)


def decode64(q, k, v, scale):
    """Attention of one sequence in fp64: q [Nq, D], k, v [total, Nkv, D]."""
    k, v = (x.double().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q.double(), k) * scale).softmax(-1), v)


def attention64(q, k, v, scale):
    """One sequence: q [n, Nq, D] are the last n of its tokens k, v [total, Nkv, D]."""
    n, total = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.arange(total, device=q.device) > torch.arange(total - n, total, device=q.device).unsqueeze(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def plan(lens, split, Nq, D, device, spare=0):
    """split_starts, max_splits, and a workspace filled with NaN, so that a read of an unwritten value is noticed."""
    starts = kernel.splits_before(lens, split)
    most = starts[-1] + spare
    workspace = Workspace(device, num_floats=kernel.workspace_floats(most, Nq, D))
    workspace.sums(0).fill_(float("nan"))
    return torch.tensor(starts, dtype=torch.int32, device=device), most, workspace
