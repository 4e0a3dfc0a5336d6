"""`minirt bench patch`: a model of transformers with and without `minirt.patch`: the time of prompts and of decode steps.

Every variant is a new model with the same weights. Before it is timed, its logits are compared with those of the model without
changes. Prompts end with the logits of their last token; a decode step is one forward pass of one token of each sequence. Both
run in transformers, eager with a cache that grows, or compiled with a static cache.
"""

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirt.bench import picture
from minirt.bench.measure import Clock, forget_peak_memory, silent
from minirt.bench.picture import Panel, Series
from minirt.bench.report import Column, Row, heading, table
from minirt.bench.summary import summarize
from minirt.device import free_memory, peak_memory
from minirt.errors import InputError, MinirtError, ModelNotFoundError, NumericsError, OutOfMemoryError
from minirt.patching import PARTS, patch
from minirt.sizes import format_size

BASELINE = "transformers"
VARIANTS = (BASELINE, "minirt", "minirt fp8", "liger")
MODES = ("eager", "compiled")
# As transformers compiles for a static cache.
COMPILE: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": "reduce-overhead"}
_CHECKED = 48  # tokens whose logits are compared
_FP8_BOUND = 0.5  # random weights: only a wrong scale or a wrong weight exceeds it


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        input_lens: tokens of single prompts.
        batch_sizes: sequences of the decode steps.
        context_len: tokens before the first decode step.
        steps: decode steps of a run.
        repeats: measured runs; one that is not counted comes first.
    """

    input_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    context_len: int
    steps: int
    repeats: int


def markdown(shared: Row, rows: list[Row]) -> str:
    """The report of `minirt bench patch`."""
    lines = [*heading(shared), f"transformers {shared['versions']['transformers']}.", ""]
    lines += [f"Correctness: {check['variant']}: {check['sentence']}." for check in shared["correctness"]["variants"]]
    lines += [f"Not measured: {name}: {why}." for name, why in shared["left_out"].items()]
    return "\n".join([*lines, "", *table(_COLUMNS, [shared | row for row in rows], left=4)]) + "\n"


_COLUMNS: list[Column] = [
    ("model", lambda r: f"{Path(r['model']).name} {r['dtype']}"), ("transformers", lambda r: r["mode"]),
    ("test", lambda r: r["test"]), ("variant", lambda r: r["variant"]),
    ("ms", lambda r: f"{r['seconds']['median'] * 1e3:,.3f}"), ("min ms", lambda r: f"{r['seconds']['min'] * 1e3:,.3f}"),
    ("t/s", lambda r: f"{r['tokens_per_s']:,.1f}"),
    ("speed", lambda r: "-" if r["speedup"] is None else f"{r['speedup']:.3f} ×"),
    ("peak GiB", lambda r: f"{r['peak_memory_bytes'] / 2**30:,.2f}"),
]  # fmt: skip


def require_transformers() -> Any:
    """transformers, which minirt does not depend on.

    Raises:
        MinirtError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MinirtError("this benchmark needs transformers, which is not installed", hint="pip install transformers") from error
    return transformers


def hf_config(name: str) -> Any:
    """The config of a preset or of a model folder, as transformers reads it.

    Raises:
        ModelNotFoundError: there is neither.
    """
    from minirt.models import raw_configs

    transformers = require_transformers()
    if Path(name).is_dir():
        return transformers.AutoConfig.from_pretrained(name)
    for short, hub_id, raw in raw_configs():
        if name in (short, hub_id):
            return transformers.AutoConfig.for_model(**raw)
    hint = "give a preset (minirt models lists them) or the folder of a model"
    raise ModelNotFoundError("neither a preset nor a folder", where=name, hint=hint)


def build(name: str, random_weights: bool, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A model of transformers in eval mode. The same arguments give the same weights.

    With random weights, norms differ from 1 and biases from 0, so that the comparison of the logits covers them.
    """
    transformers = require_transformers()
    if not random_weights:
        from minirt.loading.load import find

        files = find(name, None, need_weights=True).files
        folder = name if files is None else str(files.folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    with torch.device("meta"):
        size = sum(p.nbytes for p in transformers.AutoModelForCausalLM.from_config(hf_config(name), dtype=dtype).parameters())
    if size > (free := free_memory(device)):
        expected, hint = f"at least {format_size(size)}", "use --dtype bfloat16, or a smaller model"
        raise OutOfMemoryError("the weights do not fit", where=str(device), expected=expected, found=format_size(free), hint=hint)
    with torch.device(device), torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(name), dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for label, parameter in model.named_parameters():
        if "norm" in label:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif label.endswith("bias"):
            parameter.normal_(0, 0.3, generator=generator)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def why_not(variant: str, device: torch.device) -> str | None:
    """Why a variant cannot be measured here, or None."""
    if variant == "liger" and find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if variant == "liger" and device.type != "cuda":
        return "its kernels need a GPU"
    if variant == "minirt fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "the GPU has no FP8"
    return None


def change(variant: str, model: Any, parts: Sequence[str] = PARTS) -> Row | None:
    """Make a variant of a model, in place. Returns the table of what minirt replaced, as plain values."""
    if variant == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        # Only kernels that inference uses: the fused loss would replace the model's forward.
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    if not variant.startswith("minirt"):
        return None
    return patch(model, fp8=variant == "minirt fp8", parts=parts).as_dict()


@torch.no_grad()
def run(
    make: Callable[[], Any], sizes: Sizes, variants: Sequence[str], modes: Sequence[str], device: torch.device, *,
    parts: Sequence[str] = PARTS, seed: int = 0, progress: Callable[[str], None] = silent, clock: Clock = time.perf_counter,
) -> tuple[list[Row], Row]:
    """Measure the baseline and the variants one after the other, in the order of `VARIANTS`.

    Liger comes last, because it also replaces classes and functions of transformers, which models made later would have.

    Args:
        make: returns a new model, always with the same weights.
    Returns:
        a row for each variant, mode and test; and "correctness", "patched" (what minirt replaced) and "left_out".
    Raises:
        NumericsError: the logits of a variant are wrong, so it is not timed.
        InputError: a sequence is longer than the model allows.
    """
    rows: list[Row] = []
    checks: list[Row] = []
    patched: dict[str, Row] = {}
    left_out: dict[str, str] = {}
    expected: Tensor | None = None
    for variant in (name for name in VARIANTS if name == BASELINE or name in variants):
        if (why := why_not(variant, device)) is not None:
            left_out[variant] = why
            progress(f"{variant} is not measured: {why}")
            continue
        forget_peak_memory(device)
        model = make()
        _check_lengths(model.config, sizes)
        ids = _tokens(model.config, (1, _CHECKED), device, seed)
        if expected is None:
            expected = _logits(model, ids)
        replaced = change(variant, model, parts)
        if replaced is not None:
            patched[variant] = replaced
        if variant != BASELINE:
            checks.append(_check(variant, _logits(model, ids), expected, model.dtype))
        for mode in modes:
            for row in _measure(model, mode, sizes, device, seed, clock):
                rows.append({"variant": variant, "mode": mode, **row, "peak_memory_bytes": peak_memory(device)})
                progress(f"{variant}, {mode}: {row['test']}: {row['seconds']['median'] * 1e3:.3f} ms")
        del model
        torch._dynamo.reset()  # compiled code and CUDA graphs hold the weights
        gc.collect()
    base = {(row["mode"], row["test"]): row["seconds"]["median"] for row in rows if row["variant"] == BASELINE}
    for row in rows:
        ratio = base[row["mode"], row["test"]] / row["seconds"]["median"]
        row["speedup"] = None if row["variant"] == BASELINE else ratio
    checked = {"checked": True, "against": "the logits of the model without changes", "variants": checks}
    return rows, {"correctness": checked, "patched": patched, "left_out": left_out}


def _check_lengths(config: Any, sizes: Sizes) -> None:
    longest, most = max((*sizes.input_lens, sizes.context_len + sizes.steps + 1)), config.max_position_embeddings
    if longest > most:
        raise InputError("longer than the model allows", where="--input-len or --context-len", expected=most, found=longest)


def _tokens(config: Any, shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of a prompt, and of one token after it, which takes the kernels of decode steps."""
    out, name = model(ids[:, :-1], use_cache=True), _cache_name(model)
    return torch.cat((out.logits, model(ids[:, -1:], use_cache=True, **{name: out[name]}).logits), 1).float()


def _cache_name(model: Any) -> str:
    """The name of the argument and output that holds the cache; until transformers 5.23 "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check(variant: str, logits: Tensor, expected: Tensor, dtype: torch.dtype) -> Row:
    """Compare logits, and refuse to time what is wrong: two implementations in one dtype differ by a few roundings."""
    error = ((logits - expected).norm() / expected.norm()).item()
    limit = _FP8_BOUND if variant == "minirt fp8" else max(8 * torch.finfo(dtype).eps, 1e-5)
    if not error <= limit:
        what = "the logits differ from those of the model without changes, so there is nothing to time"
        raise NumericsError(what, where=variant, expected=f"a relative error of at most {limit:.1e}", found=f"{error:.1e}")
    sentence = f"relative error of the logits {error:.1e}, at most {limit:.1e}"
    return {"variant": variant, "logits_relative_error": error, "bound": limit, "sentence": sentence}


def _measure(model: Any, mode: str, sizes: Sizes, device: torch.device, seed: int, clock: Clock) -> Iterator[Row]:
    """The rows of one model in one mode."""

    def timed(work: Callable[[], object]) -> float:
        _wait(device)
        started = clock()
        work()
        _wait(device)
        return clock() - started

    def row(test: str, batch_size: int, tokens: int, times: list[float]) -> Row:
        seconds = summarize(times)
        rate = tokens / seconds["median"]  # type: ignore[operator]
        return {"test": test, "batch_size": batch_size, "tokens": tokens, "seconds": seconds, "tokens_per_s": rate}

    for length in sizes.input_lens:
        torch._dynamo.reset()  # each size is compiled alone, as a user who has one size does
        ids = _tokens(model.config, (1, length), device, seed)
        prompt = partial(_Runner(model, mode == "compiled", 1, length, device).prompt, ids)
        for _ in range(2):
            prompt()  # compiles, and captures CUDA graphs
        yield row(f"pp{length}", 1, length, [timed(prompt) for _ in range(sizes.repeats)])
    for batch_size in sizes.batch_sizes:
        torch._dynamo.reset()
        ids = _tokens(model.config, (batch_size, sizes.context_len), device, seed)
        runner = _Runner(model, mode == "compiled", batch_size, sizes.context_len + sizes.steps + 1, device)
        times = []
        for _ in range(sizes.repeats + 1):
            token = runner.step(runner.prompt(ids, compiled=False))
            times.append(timed(partial(runner.decode, token, sizes.steps)) / sizes.steps)
        yield row(f"tg{sizes.steps} b{batch_size} @ d{sizes.context_len}", batch_size, batch_size, times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Runner:
    """Forward passes of a model with a cache: a dynamic one, or if they are compiled a static one of `length` tokens."""

    def __init__(self, model: Any, compiled: bool, batch_size: int, length: int, device: torch.device) -> None:
        self.transformers, self.model, self.device = require_transformers(), model, device
        self.forward: Callable[..., Any] = torch.compile(model.forward, **COMPILE) if compiled else model.forward
        self.name = _cache_name(model)
        self.static = self.transformers.StaticCache(config=model.config, max_cache_len=length) if compiled else None
        self.cache: Any = self.static  # allocated by its first step
        if self.static is not None:
            model(torch.zeros(batch_size, 1, dtype=torch.int64, device=device), use_cache=True, **{self.name: self.static})

    def prompt(self, ids: Tensor, compiled: bool = True) -> Tensor:
        """The next tokens [B, 1] of prompts [B, T]. Forgets all tokens before."""
        if self.static is None:
            self.cache = self.transformers.DynamicCache(config=self.model.config)
        else:
            self.static.reset()
        self.seen = 0
        return self.step(ids, compiled)

    def decode(self, token: Tensor, steps: int) -> None:
        for _ in range(steps):
            token = self.step(token)

    def step(self, ids: Tensor, compiled: bool = True) -> Tensor:
        """A forward pass of the next tokens of each sequence: ids [B, T] → the most probable next tokens [B, 1]."""
        positions = torch.arange(self.seen, self.seen + ids.shape[1], device=self.device).unsqueeze(0)
        self.seen += ids.shape[1]
        forward = self.forward if compiled else self.model.forward
        if compiled and self.static is not None:
            torch.compiler.cudagraph_mark_step_begin()
        out = forward(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{self.name: self.cache})
        return out.logits[:, -1].argmax(-1, keepdim=True)


def versions() -> dict[str, str]:
    """The versions of the libraries that are compared."""
    installed = {"transformers": version("transformers"), "liger-kernel": "not installed"}
    with suppress(PackageNotFoundError):
        installed["liger-kernel"] = version("liger-kernel")
    return installed


def draw(shared: Row, rows: list[Row], target: Path) -> None:
    """Write a picture: the speed of each variant relative to transformers, for each test and mode. Needs matplotlib.

    Raises:
        MinirtError: the file cannot be written.
    """
    modes, tests, variants = (list(dict.fromkeys(row[name] for row in rows)) for name in ("mode", "test", "variant"))
    variants = [name for name in variants if name != BASELINE]
    width = 0.8 / max(1, len(variants))
    speedups = {(row["variant"], row["mode"], row["test"]): row["speedup"] for row in rows}
    panels = []
    for mode in modes:
        series = [
            Series(name, [speedups[name, mode, test] for test in tests], width=width, shift=(i + 0.5) * width - 0.4)
            for i, name in enumerate(variants)
        ]
        about = "speed, relative to the model without changes"
        panels.append(Panel(series, f"transformers {mode}", ylabel=about, ticks=tests, rotation=30, level=1.0))
    kind = "" if shared["backend"] == "CUDA" else "\nCPU figures, no GPU"
    title = f"{Path(shared['model']).name} {shared['dtype']} · {shared['device']} · minirt {shared['commit']}{kind}"
    picture.draw([panels], title, target, (2.0 + 1.1 * len(tests) * len(modes), 4.5))
