"""python3 -P gpu_attn.py: correctness of every configuration in a process of its own, then TFLOP/s of those that passed."""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIGS = {  # teams, block_n, stages, overlap, in_turn, persistent
    "A 2x128 over+turn pers": (2, 128, 2, True, True, True),
    "B 2x128 over pers": (2, 128, 2, True, False, True),
    "C 2x128 over+turn grid": (2, 128, 2, True, True, False),
    "D 2x128 turn pers": (2, 128, 2, False, True, True),
    "E 2x128 plain pers": (2, 128, 2, False, False, True),
    "F 2x64 over+turn pers": (2, 64, 4, True, True, True),
    "G 3x64 over pers": (3, 64, 3, True, False, True),
    "H 3x128 plain pers": (3, 128, 2, False, False, True),
    "I 2x128x3 over+turn pers": (2, 128, 3, True, True, True),
}
CASES = [  # Nq, Nkv, D, page_size, dtype, lens, contexts
    (28, 4, 128, 64, "bfloat16", (64,), (0,)),
    (28, 4, 128, 64, "bfloat16", (2048,), (0,)),
    (28, 4, 128, 64, "bfloat16", (100, 1, 700, 33), (0, 3000, 1500, 8)),
    (28, 4, 128, 64, "bfloat16", (0, 5, 0, 129), (20, 3, 0, 127)),
    (28, 4, 128, 16, "float16", (17, 50, 300), (129, 0, 1000)),
    (3, 1, 128, 128, "bfloat16", (3, 1, 37, 400), (0, 16, 70, 517)),
    (16, 1, 128, 256, "float16", (130, 1000), (5, 0)),
    (32, 8, 128, 64, "bfloat16", (1,) * 40 + (513, 127), (*range(0, 4000, 100), 7, 128)),
    (14, 2, 64, 64, "bfloat16", (700, 65, 1500), (3, 1000, 0)),
    (4, 4, 64, 32, "float16", (300, 1), (0, 300)),
]
SHAPES = [(28, 4, 128), (32, 8, 128), (14, 2, 64)]
TOKENS = (512, 2048, 8192, 32768)


def site() -> str:
    """A folder from which minirt is imported as it lies here."""
    root = Path(tempfile.mkdtemp())
    (root / "minirt").mkdir()
    for path in (*(HERE / "minirt").iterdir(), *(HERE / name for name in ("models", "kernels", "bench"))):
        (root / "minirt" / path.name).symlink_to(path)
    return str(root)


def pages_for(totals, Nkv, D, page_size, dtype, torch):
    counts = [-(-n // page_size) for n in totals]
    k = torch.full((sum(counts) + 1, page_size, Nkv, D), torch.nan, dtype=dtype, device="cuda")
    v = k.clone()
    order = iter(torch.randperm(len(k), generator=torch.Generator().manual_seed(2)).tolist())
    unused = next(order)
    tables = torch.full((len(totals), max(counts) + 1), unused, dtype=torch.int32)
    keys, values = [], []
    for row, n, count in zip(tables, totals, counts, strict=True):
        row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
        t = torch.arange(n)
        at = (row[t // page_size].long().cuda(), (t % page_size).cuda())
        keys.append(torch.randn(n, Nkv, D, device="cuda").to(dtype))
        values.append(torch.randn(n, Nkv, D, device="cuda").to(dtype))
        k[at], v[at] = keys[-1], values[-1]
    return k, v, tables.cuda(), torch.tensor(totals, dtype=torch.int32, device="cuda"), keys, values


def check(name: str) -> None:
    import torch
    from minirt.kernels import attention, attention_hopper

    config = attention_hopper.HopperAttentionConfig(*CONFIGS[name]) if name in CONFIGS else None
    if config is None:
        config = attention.choose_config(2, 128, False, 90)
    torch.manual_seed(1)
    worst = 0.0
    for Nq, Nkv, D, page, dtype_name, lens, contexts in CASES:
        dtype = getattr(torch, dtype_name)
        totals = [n + c for n, c in zip(lens, contexts, strict=True)]
        k, v, tables, seq_lens, keys, values = pages_for(totals, Nkv, D, page, dtype, torch)
        T, pad, scale = sum(lens), 70, 1.3 * D**-0.5
        q = torch.randn(T + pad, Nq, D, device="cuda").to(dtype)
        starts = list(itertools.accumulate(lens, initial=0))
        on_device = torch.tensor(starts, dtype=torch.int32, device="cuda")
        outs = []
        for _ in range(3):
            out = torch.full_like(q, torch.nan)
            attention.paged_attention_prefill(q, k, v, tables, on_device, seq_lens, scale, out, config=config)
            torch.cuda.synchronize()
            outs.append(out)
        what = f"{Nq}/{Nkv} D{D} page {page} {dtype_name} {lens if len(lens) < 6 else len(lens)}"
        limit = 8e-3 if dtype == torch.bfloat16 else 1.5e-3
        faults = []
        if not all(torch.equal(outs[0].view(torch.int16), o.view(torch.int16)) for o in outs):
            faults.append("bits differ from run to run")
        if not outs[0][T:].isnan().all():
            faults.append("padding was written")
        for s, (start, n) in enumerate(zip(starts, lens, strict=False)):
            if n == 0:
                continue
            rows = q[start : start + n].float()
            kk, vv = (x[s].float().repeat_interleave(Nq // Nkv, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", rows, kk) * scale
            hidden = torch.arange(totals[s], device="cuda") > torch.arange(totals[s] - n, totals[s], device="cuda")[:, None]
            truth = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vv)
            error = (outs[0][start : start + n].float() - truth).abs() / truth.abs().max()
            bad = (~(error < limit)).nonzero()
            if len(bad):
                faults.append(f"seq {s}: {len(bad)} of {error.numel()} bad, first {bad[0].tolist()} last {bad[-1].tolist()}")
            worst = max(worst, float(error.nan_to_num(9).max()))
        if faults:
            print(f"FAIL {name} | {what}: {'; '.join(faults[:3])}", flush=True)
            sys.exit(1)
    print(f"ok   {name} | worst error {worst:.1e}", flush=True)


def median_ms(call, torch, count=20):
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for a, b in pairs:
        a.record()
        call()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[count // 2]


def measure(names: list[str]) -> None:
    import torch
    from minirt.kernels import attention, attention_hopper
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import triton

    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, "TFLOP/s at", TOKENS, flush=True)
    for Nq, Nkv, D in SHAPES:
        result: dict[str, list[str]] = {}
        for T in TOKENS:
            page = 64
            count = T // page
            k, v = (torch.randn(count, page, Nkv, D, device="cuda").bfloat16() for _ in range(2))
            q = torch.randn(T, Nq, D, device="cuda").bfloat16()
            out = torch.empty_like(q)
            tables = torch.randperm(count).int().cuda()[None]
            starts, lens = torch.tensor([0, T]).int().cuda(), torch.tensor([T]).int().cuda()
            flops = attention.cost([T], [T], Nq, Nkv, D, 2)[1]
            calls = {}
            for name in names:
                c = attention_hopper.HopperAttentionConfig(*CONFIGS[name])
                calls[name] = lambda c=c: attention.paged_attention_prefill(
                    q, k, v, tables, starts, lens, D**-0.5, out, check=False, config=c
                )
            c = attention.choose_config(2, D, False, 90)
            calls["today"] = lambda c=c: attention.paged_attention_prefill(
                q, k, v, tables, starts, lens, D**-0.5, out, check=False, config=c
            )
            heads = [x.view(1, T, -1, D).transpose(1, 2).contiguous() for x in (q, k, v)]

            def cudnn(heads=heads, gqa=True):
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=gqa)

            calls["cuDNN"] = cudnn
            try:
                cudnn()
            except RuntimeError:
                heads = [x.repeat_interleave(Nq // x.shape[1], 1) for x in heads]
                calls["cuDNN"] = lambda heads=heads: cudnn(heads, False)
            for name, call in calls.items():
                try:
                    figure = f"{flops / median_ms(call, torch, 20 if T < 20000 else 8) / 1e9:5.0f}"
                except Exception as error:
                    figure = f"{type(error).__name__}: {str(error)[:60]}"
                result.setdefault(name, []).append(figure)
        for name, figures in result.items():
            print(f"{Nq}/{Nkv} D{D} | {name:24} | {' '.join(figures)}", flush=True)


def main() -> None:
    environment = {**os.environ, "PYTHONPATH": site()}
    began = time.monotonic()
    running = {}
    for name in (*CONFIGS, "today"):
        command = [sys.executable, "-P", __file__, "check", name]
        running[name] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    passed = []
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1, began + 55 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"HANG {name}"
        lines = [line for line in output.strip().splitlines() if line.strip()]
        print("\n".join(lines[-1:] if process.returncode == 0 else lines[-4:]), flush=True)
        if process.returncode == 0 and name in CONFIGS:
            passed.append(name)
    print(f"checks took {time.monotonic() - began:.0f} s", flush=True)
    try:
        subprocess.run([sys.executable, "-P", __file__, "measure", *passed], env=environment, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        print("measuring took too long", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", name]:
            check(name)
        case ["measure", *names]:
            measure(names)
        case _:
            main()
