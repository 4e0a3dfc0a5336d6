"""The operations of `minirt bench kernels` on KV pages: rotary embedding with KV write, and attention. See `operations`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from minirt.bench.kernels.operations import FP8, Form, Inputs, Problem, Step, fill_nan, operation, problem
from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.kernels.attention.limits import HEAD_DIMS, KV_SPLIT
from minirt.modeling.rope import rope_table
from minirt.step.kv_cache import PAGE_SIZE

_ROWS = 48  # rows of the result that are compared with the truth; fewer than elsewhere, because each row reads its whole context


class Pages:
    """KV pages of B sequences of `length` tokens in random order, and the block tables [B, pages]."""

    def __init__(self, inputs: Inputs, sequences: int, length: int, fp8: bool) -> None:
        step = inputs.step
        if step.config.head_dim not in HEAD_DIMS:
            expected = f"one of {', '.join(map(str, HEAD_DIMS))}"
            raise UnsupportedError("no kernel for this head size", expected=expected, found=step.config.head_dim)
        counts = -(-length // PAGE_SIZE)
        total = sequences * counts + 1
        shape = (total, PAGE_SIZE, step.config.num_kv_heads, step.config.head_dim)
        self.length, self.scales = length, dict[str, Any]()
        self.k, self.v = inputs.normal(*shape), inputs.normal(*shape)
        if fp8:
            (self.k, k_scales), (self.v, v_scales) = reference.quantize_fp8(self.k), reference.quantize_fp8(self.v)
            self.scales = {"k_scales": k_scales, "v_scales": v_scales}
        self.tables = inputs.order(total)[: sequences * counts].view(sequences, counts).int()
        self.lens = torch.full((sequences,), length, dtype=torch.int32, device=step.device)

    def slots(self, start: int, sequence: int | slice = slice(None)) -> Tensor:
        """Return the slots of the tokens from `start` on: [B, n] or, for one sequence, [n]; int64."""
        t = torch.arange(start, self.length, device=self.tables.device)
        return self.tables[sequence][..., t // PAGE_SIZE].long() * PAGE_SIZE + t % PAGE_SIZE

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V at `slots` [...] in fp64, both [..., Nkv, D]."""
        read = []
        for pages, scales in ((self.k, self.scales.get("k_scales")), (self.v, self.scales.get("v_scales"))):
            if scales is None:
                read.append(pages.flatten(0, 1)[slots].double())
            else:
                values = pages.view(torch.uint8).flatten(0, 1)[slots].view(FP8).double()
                read.append(values * scales.flatten(0, 1)[slots].double().unsqueeze(-1))
        return read[0], read[1]

    def blank(self, slots: Tensor) -> None:
        """Fill `slots`, which the step itself writes, with NaN."""
        for pages in (self.k, self.v, *self.scales.values()):
            flat = pages.view(torch.uint8) if pages.dtype == FP8 else pages
            flat.flatten(0, 1)[slots.flatten()] = 0x7F if pages.dtype == FP8 else torch.nan

    def attend(self, q: Tensor, new: int, scale: float) -> Tensor:
        """Attention in eager PyTorch of `new` tokens of each sequence, q [B * new, Nq, D]."""
        count, scales = len(self.tables), (self.scales.get("k_scales"), self.scales.get("v_scales"))
        return reference.paged_attention(q, self.k, self.v, self.tables, [new] * count, [self.length] * count, scale, *scales)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        reference.write_kv(k, self.k, slots, self.scales.get("k_scales"))
        reference.write_kv(v, self.v, slots, self.scales.get("v_scales"))


class Heads:
    """The output of the QKV projection [T, (Nq + 2·Nkv)·D], with QK-norm and rotary embedding."""

    def __init__(self, inputs: Inputs, positions: Tensor, length: int, normalize: bool) -> None:
        config = inputs.step.config
        self.counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.D, self.eps, self.positions = config.head_dim, config.rms_norm_eps, positions
        self.qkv = inputs.normal(len(positions), sum(self.counts) * self.D, scale=2.0)
        self.cos_sin = rope_table(config.rope, self.D, length, positions.device)
        self.q_norm = inputs.norm(self.D) if normalize else None
        self.k_norm = inputs.norm(self.D) if normalize else None

    def split(self, rows: Any = slice(None), double: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k (both normalized and rotated) and v of `rows`, in the dtype of the activations or in fp64."""
        qkv = self.qkv[rows].double() if double else self.qkv[rows]
        q, k, v = qkv.view(len(qkv), -1, self.D).split(self.counts, dim=1)
        turn = self.cos_sin[self.positions[rows]]
        return self._turned(q, self.q_norm, turn), self._turned(k, self.k_norm, turn), v

    def _turned(self, x: Tensor, norm: Tensor | None, turn: Tensor) -> Tensor:
        x = x if norm is None else reference.rms_norm(x, norm.to(x.dtype), self.eps)
        return reference.rope(x, turn.to(x.dtype))


def rope_kv_write(step: Step, normalize: bool, fp8: bool = False) -> Problem:
    """Rotate (and optionally normalize) q and k of a prompt, and write K and V to the pages."""
    kernel, cost = operation("qk_norm_rope_kv_write")
    inputs, T, config = Inputs(step), step.tokens, step.config
    Nq, Nkv, D = config.num_heads, config.num_kv_heads, config.head_dim
    heads, pages = Heads(inputs, torch.arange(T, device=step.device), T, normalize), Pages(inputs, 1, T, fp8)
    slots, out = pages.slots(0, 0), inputs.nan(T, Nq, D)

    def eager() -> Tensor:
        q, k, v = heads.split()
        pages.write(k, v, slots)
        return q

    def triton() -> Tensor:
        return kernel(
            heads.qkv, heads.cos_sin, heads.positions, slots, pages.k, pages.v, Nq, Nkv, heads.q_norm, heads.k_norm, heads.eps,
            out, check=False, **pages.scales,
        )  # fmt: skip

    def truth(rows: Tensor) -> Tensor:
        q, k, v = heads.split(rows, double=True)
        return torch.cat((q, *(_stored(x, fp8) for x in (k, v))), 1)

    def blank() -> None:
        fill_nan(out)
        pages.blank(slots)

    return problem(
        step, f"heads {Nq}:{Nkv} of {D}", eager, triton, truth, cost(T, Nq, Nkv, D, heads.qkv.itemsize, fp8), rounded=fp8,
        view=lambda q: torch.cat((q, *pages.read(slots)), 1), blank=blank,
    )  # fmt: skip


def _stored(x: Tensor, fp8: bool) -> Tensor:
    """Return x [T, Nkv, D] in fp64 as it is after a write to the pages: rounded if these are FP8."""
    if not fp8:
        return x.double()
    values, scales = reference.quantize_fp8(x)
    return values.double() * scales.double().unsqueeze(-1)


def attend64(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return causal attention [R, Nq, D] of q [R, Nq, D] at `positions` [R] on k, v [total, Nkv, D], all in fp64."""
    groups = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("rngd,knd->rngk", groups, k) * scale
    hidden = torch.arange(len(k), device=k.device) > positions.unsqueeze(1)
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("rngk,knd->rngd", weights, v).flatten(1, 2)


def attention_prefill(step: Step, fp8: bool = False) -> Problem:
    """Attention of T new tokens of one sequence on its pages, which hold `context` older tokens and the new ones."""
    from minirt.kernels.attention.partial import workspace_floats

    total = step.context + step.tokens
    splits = -(-total // KV_SPLIT)
    floats = workspace_floats(splits, step.config.num_heads, step.config.head_dim)
    return _attention(step, "paged_attention_prefill", 1, step.tokens, total, fp8, floats, max_splits=splits)


def attention_few(step: Step, fp8: bool = False, new: int = 5) -> Problem:
    """Attention of `new` new tokens for each of T sequences of `context` tokens, with the new ones: drafts to verify."""
    from minirt.kernels.attention.decode import splits_before
    from minirt.kernels.attention.decode_few import workspace_floats

    B, total = step.tokens, max(step.context, new)
    splits = splits_before([total] * B)
    floats = workspace_floats(splits[-1], step.config.num_heads, step.config.head_dim)
    return _attention(
        step, "paged_attention_decode_few", B, new, total, fp8, floats, f", {new} tokens each", max_splits=splits[-1],
        split_starts=torch.tensor(splits, dtype=torch.int32, device=step.device), max_query_len=new,
    )  # fmt: skip


def _attention(
    step: Step, name: str, B: int, new: int, total: int, fp8: bool, floats: int, note: str = "", **further: Any
) -> Problem:
    """Attention of `new` new tokens for each of B sequences of `total` tokens, with the new ones.

    Args:
        floats: values in the kernel's workspace.
        further: its arguments beside the tensors.
    """
    from minirt.kernels.launch import Workspace

    (kernel, cost), inputs, config = operation(name), Inputs(step), step.config
    Nq, Nkv, D = config.num_heads, config.num_kv_heads, config.head_dim
    q, pages, scale, out = inputs.normal(B * new, Nq, D), Pages(inputs, B, total, fp8), D**-0.5, inputs.nan(B * new, Nq, D)
    starts = torch.arange(0, B * new + 1, new, dtype=torch.int32, device=step.device)
    triton = partial(
        kernel, q, pages.k, pages.v, pages.tables, starts, pages.lens, scale=scale, out=out, check=False,
        workspace=Workspace(step.device, num_floats=floats), **pages.scales, **further,
    )  # fmt: skip
    k, v = (x.to(step.dtype).transpose(1, 2).contiguous() for x in pages.read(pages.slots(0)))

    def library() -> Tensor:
        options: dict[str, Any] = {"is_causal": True} if total == new else {"attn_mask": causal_lower_right(new, total)}
        heads_first = q.view(B, new, Nq, D).transpose(1, 2)
        return F.scaled_dot_product_attention(heads_first, k, v, scale=scale, enable_gqa=Nq != Nkv, **options)

    def truth(rows: Tensor) -> Tensor:
        results = []
        for sequence in (rows // new).unique().tolist():
            chosen = rows[rows // new == sequence]
            cached = pages.read(pages.slots(0, sequence))
            results.append(attend64(q[chosen].double(), *cached, chosen % new + total - new, scale))
        return torch.cat(results)

    return problem(
        step, f"heads {Nq}:{Nkv} of {D}{note}", lambda: pages.attend(q, new, scale), triton, truth,
        cost([new] * B, [total] * B, Nq, Nkv, D, q.itemsize, fp8),
        library=_without(library, "pages", fp8), outputs=[out], rows=_ROWS,
    )  # fmt: skip


def attention_decode(step: Step, fp8: bool = False) -> Problem:
    """Rotary embedding, KV write and attention of one new token for each of T sequences of `context` tokens, with the new one."""
    from minirt.kernels.attention.decode import splits_before, workspace_floats
    from minirt.kernels.launch import Workspace

    kernel, cost = operation("rope_paged_attention_decode")
    inputs, B, total, config = Inputs(step), step.tokens, step.context, step.config
    Nq, Nkv, D = config.num_heads, config.num_kv_heads, config.head_dim
    scale, pages = D**-0.5, Pages(inputs, B, total, fp8)
    heads = Heads(inputs, torch.full((B,), total - 1, device=step.device), total, config.qk_norm)
    slots, out, splits = pages.slots(total - 1).flatten(), inputs.nan(B, Nq, D), splits_before([total] * B)
    starts = torch.tensor(splits, dtype=torch.int32, device=step.device)
    workspace = Workspace(step.device, num_floats=workspace_floats(splits[-1], Nq, D))
    before = pages.slots(0)
    before[:, -1] = before[:, 0]  # the last slot is NaN, which could change the library's time
    k, v = (x.to(step.dtype).transpose(1, 2).contiguous() for x in pages.read(before))

    def library() -> Tensor:
        q = heads.qkv.view(B, -1, 1, D)[:, :Nq]
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=Nq != Nkv)

    def eager() -> Tensor:
        q, new_k, new_v = heads.split()
        pages.write(new_k, new_v, slots)
        return pages.attend(q, 1, scale)

    def triton() -> Tensor:
        return kernel(
            heads.qkv, heads.cos_sin, pages.k, pages.v, pages.tables, pages.lens, starts, splits[-1], scale, workspace, Nq,
            heads.q_norm, heads.k_norm, heads.eps, out, check=False, **pages.scales,
        )  # fmt: skip

    def truth(rows: Tensor) -> Tensor:
        q, new_k, new_v = heads.split(rows, double=True)
        stored = [_stored(x, fp8) for x in (new_k, new_v)]
        results = []
        for i, row in enumerate(rows.tolist()):
            cached = pages.read(pages.slots(0, row)[:-1])
            k, v = (torch.cat((old, new[i : i + 1])) for old, new in zip(cached, stored, strict=True))
            results.append(attend64(q[i : i + 1], k, v, torch.tensor([total - 1], device=k.device), scale))
        return torch.cat((torch.cat(results), *stored), 1)

    def blank() -> None:
        fill_nan(out)
        pages.blank(slots)

    return problem(
        step, f"heads {Nq}:{Nkv} of {D}", eager, triton, truth, cost([1] * B, [total] * B, Nq, Nkv, D, heads.qkv.itemsize, fp8),
        library=_without(library, "rotation, KV write, pages", fp8), rounded=fp8,
        view=lambda x: torch.cat((x, *pages.read(slots)), 1), blank=blank, rows=_ROWS,
    )  # fmt: skip


def _without(library: Callable[[], Tensor], lacks: str, fp8: bool) -> dict[str, Form]:
    return {"library": Form(library, lacks + (", fp8" if fp8 else ""))}
