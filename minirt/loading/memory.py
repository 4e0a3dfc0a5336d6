"""What a model takes of a device's memory: `plan_memory` sizes the KV cache and the largest step, before or after loading.

On a GPU, weights, KV pages and the memory of steps together take at most `gpu_memory_utilization` of what is free at the start.
What other processes and CUDA contexts hold lowers this budget, and the plan says so. vLLM takes a share of all memory, and
refuses to start if other processes hold too much of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from minirt.device import AnyDevice, compute_capability, free_memory, held_by_others, is_out_of_memory, total_memory
from minirt.engine.execute.logits_processors import PROCESSED_ROWS
from minirt.engine.limits import CPU_NUM_BATCHED_TOKENS, EngineLimits
from minirt.engine.schedule.windows import window_pages
from minirt.errors import ConfigError, OutOfMemoryError
from minirt.kernels.reference import INT4_MAX_TOKENS
from minirt.kernels.sampling.slots import slot_bytes
from minirt.loading.options import LoadOptions
from minirt.modeling.model import Model
from minirt.sizes import format_size
from minirt.step.kv_cache import PAGE_SIZE, page_bytes, state_bytes, windows_of
from minirt.wording import warn

GPU_MEMORY_UTILIZATION = 0.9
CPU_SHARE = 0.25  # of the memory that is free beside the weights
STATE_SHARE = 0.5  # of the memory for KV pages and for states and windows, that the latter may take
STEP_SHARE = 0.1  # of the memory for states and windows that is left to steps, if there is nothing else
SNAPSHOT_SHARE = 0.25  # of the memory that is left then: snapshots of states, for the prefix cache
SNAPSHOTS_OF_A_SEQUENCE = 4  # at most, for each sequence that runs at once
NUM_BATCHED_TOKENS = (8192, 4096, 2048, 1024)  # the defaults that are tried on a GPU

StepBytes = Callable[[EngineLimits], int | None]  # the bytes that steps need; None: they do not fit


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes of a device's memory, in bytes.

    Attributes:
        weights, other: the weights; rope tables and the state of recurrent layers.
        step: what steps need beside them: activations of the largest step, CUDA graphs, logits, sampler, penalties and masks.
        page, pages: the size of a KV page, and how many there are.
        free: what is free before the model is loaded; of an absent GPU an estimate.
        budget: what the model may take of it.
        total: all memory of the device.
        held_by_others: about what other processes and CUDA contexts hold of it, which lowers `free` and so the budget; see
            `minirt.device.held_by_others`. None: not known (a CPU).
        full: the pages of `max_num_seqs` sequences of full length.
        context: positions that a sequence may have: those asked for, or what all pages hold, if that is less.
        max_num_batched_tokens: tokens of the largest step.
        max_num_seqs: sequences that run at once: those asked for, or fewer if their states would take too much.
        state: the states of one of them, in bytes; 0: there is no recurrent layer.
        snapshots: how many states are kept beside those of the sequences that run, for the prefix cache.
        measured: whether `step` was measured; otherwise it is an estimate.
        asked: positions that were asked for, all of which must fit. None: fewer will do.
        window, window_pages: of layers with windows below the context: bytes of their pages; their number by window.
        kept: bytes that a sequence keeps in states and windows.
        adapters: bytes of adapters on the device, a part of `other`.
    """

    weights: int
    other: int
    step: int
    page: int
    pages: int
    free: int
    budget: int
    total: int
    held_by_others: int | None
    full: int
    context: int
    max_num_batched_tokens: int
    max_num_seqs: int
    state: int
    snapshots: int = 0
    measured: bool = False
    asked: int | None = None
    window: int = 0
    window_pages: Mapping[int, int] = field(default_factory=dict)
    kept: int = 0
    adapters: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of everything but the KV pages."""
        return self.weights + self.other + self.step + self.snapshots * self.state + self.window

    @property
    def least_pages(self) -> int:
        """The pages that must fit: those of one sequence with the context that was asked for, else one."""
        return -(-(self.asked or 1) // PAGE_SIZE)

    @property
    def least(self) -> int:
        """Bytes of everything, with no more KV pages than must fit."""
        return self.fixed + self.least_pages * self.page

    @property
    def needed(self) -> int:
        """Bytes of everything, with `least_pages` at least."""
        return self.fixed + max(self.pages, self.least_pages) * self.page

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget and self.context >= (self.asked or 0)

    @property
    def only_context_is_short(self) -> bool:
        """Whether a shorter context than the one that was asked for would fit."""
        return not self.fits and replace(self, asked=None).fits

    @property
    def tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self.pages * PAGE_SIZE

    @property
    def others(self) -> str | None:
        """What other processes and CUDA contexts hold, in words; None: nothing that lowers the budget."""
        if not self.held_by_others:
            return None
        held = f"about {format_size(self.held_by_others)} of {format_size(self.total)}"
        return f"{held} are held by other processes and CUDA contexts, which lowers the budget"

    def rows(self) -> list[tuple[str, int, str]]:
        """The table that `minirt plan` prints: (what, bytes, remark)."""
        step = f"{'measured' if self.measured else 'estimate'}, at most {self.max_num_batched_tokens:,} tokens in a step"
        states = f"states of {self.max_num_seqs:,} sequences, {format_size(self.state)} each" if self.state else ""
        table = [("weights", self.weights, ""), ("rope tables and states", self.other - self.adapters, states)]
        table += [("adapters", self.adapters, "")] * (self.adapters > 0)
        table += [("steps", self.step, step)] * (self.step > 0)
        kept = f"{self.snapshots:,} snapshots of states, for the prefix cache"
        table += [("state cache", self.snapshots * self.state, kept)] * (self.snapshots > 0)
        last = ", ".join(f"{count:,} pages of the last {window:,} tokens" for window, count in self.window_pages.items())
        table += [("KV cache, windows", self.window, last)] * (self.window > 0)
        return table + [("KV cache", self.pages * self.page, f"{self.pages:,} pages, {self.tokens:,} tokens")] * (self.page > 0)


def plan_memory(
    model: Model, length: int, device: AnyDevice, options: LoadOptions, *, step_bytes: StepBytes | None = None
) -> MemoryPlan:
    """Size the KV cache, and the largest step unless the options do.

    Args:
        model: a model with its dtypes: without weights, or with weights if `step_bytes` is given.
        length: positions to serve.
        step_bytes: measures a step on a GPU. None: steps are estimated, and nothing is allocated.
    """
    if device.type == "cpu" and options.gpu_memory_utilization is not None:
        what, expected = "a CPU has no GPU memory", "a GPU, or --kv-cache-memory"
        raise ConfigError(what, where="--gpu-memory-utilization", expected=expected, found="device cpu")
    on_cpu, loaded = device.type == "cpu", step_bytes is not None
    specs = model.cache_specs
    windows, state = windows_of(specs, length), state_bytes(specs)
    page = page_bytes(specs, model.kv_dtype, windows=windows)
    weights, each = model.weight_bytes(model.dtype), model.rope_bytes(length)
    tables = sum(each)
    adapters = 0 if model.adapters is None else model.adapters.nbytes(model.dtype)
    free, others = free_memory(device) + (weights + tables + adapters) * loaded, held_by_others(device)
    budget = free if on_cpu else int(free * (options.gpu_memory_utilization or GPU_MEMORY_UTILIZATION))
    drafts = options.draft_needs

    def of_windows(seqs: int, tokens: int) -> dict[int, int]:
        return {window: window_pages(window, seqs, tokens, drafts.max_drafts, length) for window in windows}

    def window_bytes(pages: Mapping[int, int]) -> int:
        return sum(page_bytes(specs, model.kv_dtype, window=window) * count for window, count in pages.items())

    kept = state + window_bytes(of_windows(1, 0))
    share = STATE_SHARE if page else 1 - STEP_SHARE
    options = _with_fitting_sequences(options, kept, share, budget - weights - tables, on_cpu)
    full = options.max_num_seqs * -(-length // PAGE_SIZE)
    asked = None if options.kv_bytes is None else min(_pages_in(options.kv_bytes, page), full)
    if on_cpu and not loaded:
        tables += 3 * max(each, default=0)  # while a table is computed, there are temporary tensors
    other = tables + options.max_num_seqs * state + adapters
    fixed = weights + other
    if on_cpu:
        budget = free if asked is not None else min(free, fixed + int(max(0, free - fixed) * CPU_SHARE))
    defaults = (CPU_NUM_BATCHED_TOKENS,) if on_cpu else NUM_BATCHED_TOKENS
    step_bytes = step_bytes or partial(estimate_step, model, cuda_graphs=options.cuda_graphs, device=device)
    step, pages, snapshots, seqs, in_windows = 0, 0, 0, options.max_num_seqs, dict[int, int]()
    for tokens in defaults if options.max_num_batched_tokens is None else (options.max_num_batched_tokens,):
        limits = EngineLimits(length, seqs, tokens, max_drafts=drafts.max_drafts, keeps_history=drafts.needs_history)
        needed = 0 if on_cpu else step_bytes(limits)
        if needed is None:
            continue
        in_windows = of_windows(seqs, tokens)
        step, room = needed, budget - fixed - needed - window_bytes(in_windows)
        snapshots = _snapshots(options, state, room, room - page * (asked or 0))
        pages = full if not page else max(0, min((room - snapshots * state) // page, full))
        if pages >= (-(-length // PAGE_SIZE) if asked is None else asked):
            break
    pages = pages if asked is None else asked
    context = min(length, pages * PAGE_SIZE) if page else length
    return MemoryPlan(
        weights, other, step, page, pages, free, budget, total_memory(device), others, full, context, tokens,
        seqs, state, snapshots, measured=loaded and step > 0, asked=options.max_model_len,
        window=window_bytes(in_windows), window_pages=in_windows, kept=kept, adapters=adapters,
    )  # fmt: skip


def _with_fitting_sequences(options: LoadOptions, kept: int, share: float, room: int, on_cpu: bool) -> LoadOptions:
    """The options with fewer sequences if what each keeps would take more than a share of the memory for that and KV pages, or
    more than the requested pages leave. At least one.

    Args:
        kept: bytes of states and windows.
        room: what the weights and the rope tables leave.
    """
    if not kept:
        return options
    room -= options.snapshot_bytes or 0
    room = int(room * share * (CPU_SHARE if on_cpu else 1)) if options.kv_bytes is None else room - options.kv_bytes
    return replace(options, max_num_seqs=max(1, min(options.max_num_seqs, room // kept)))


def _snapshots(options: LoadOptions, state: int, room: int, beside: int) -> int:
    """The number of snapshots of states.

    Args:
        state: bytes of one.
        room: bytes for snapshots and KV pages; `beside`: those that the pages which were asked for leave.
    """
    asked = options.snapshot_bytes
    if not state:
        if asked:
            what, expected = "the model has no recurrent layers, whose states could be kept", "no value"
            raise ConfigError(what, where="--state-cache-memory", expected=expected, found=asked)
        return 0
    if asked is not None:
        if 0 < asked < state:
            expected = f"0, or {format_size(state, up=True)} (the states of one sequence) or more"
            raise ConfigError("too small", where="--state-cache-memory", expected=expected, found=format_size(asked))
        return asked // state
    most = min(int(room * SNAPSHOT_SHARE), beside) // state
    return max(0, min(most, SNAPSHOTS_OF_A_SEQUENCE * options.max_num_seqs)) if options.prefix_cache else 0


def measured_plan(model: Model, options: LoadOptions) -> MemoryPlan:
    """The plan of a model with weights. On a GPU, the memory of its steps is measured.

    Warns if the context has to be shorter than `model.max_model_len`, and if fewer sequences than asked for can run at once.

    Raises:
        OutOfMemoryError: there is no room for a KV page, or for the context that was asked for.
    """
    device, length = model.device, model.max_model_len
    if (asked := options.max_model_len) is not None:
        if type(asked) is not int or not 1 <= asked <= length:
            expected = f"an integer from 1 to {length}, the positions that the model was loaded with"
            raise ConfigError("outside the model's context", where="--max-model-len", expected=expected, found=repr(asked)[:80])
        length = asked

    def step_bytes(limits: EngineLimits) -> int | None:
        from minirt.engine.warmup.warm_up import measure_step_bytes

        return measure_step_bytes(model, limits, cuda_graphs=options.cuda_graphs and device.type == "cuda" and model.capturable)

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left to PyTorch's allocator counts as free
    plan = plan_memory(model, length, device, options, step_bytes=step_bytes)
    if plan.max_num_seqs < (seqs := options.max_num_seqs):
        what = f"{plan.max_num_seqs} instead of {seqs} sequences run at once (--max-num-seqs)"
        why = f"each keeps {format_size(plan.kept)} of states and windows, and the free memory has no room for more"
        warn(f"{what}: {why}", RuntimeWarning)
    if plan.page and plan.pages < 1:
        raise does_not_fit(plan, str(device), "use a smaller model, or free memory")
    if plan.only_context_is_short:
        raise does_not_fit(plan, str(device), f"use --max-model-len {plan.context}")
    if plan.state and not plan.snapshots and options.prefix_cache and options.snapshot_bytes is None:
        what = f"no prefix cache: it needs states of {format_size(plan.state)} each, and the free memory has no room for them"
        warn(f"{what} beside the KV pages; --state-cache-memory makes room", RuntimeWarning)
    if plan.context < length:
        what, ways = "the free memory", [f"--max-model-len {plan.context}"]
        if options.kv_bytes is not None:
            what = f"--kv-cache-memory {format_size(options.kv_bytes)}"
            ways.append(f"--kv-cache-memory {format_size(-(-length // PAGE_SIZE) * plan.page, up=True)}")
        elif fewer := sequences_that_fit(lambda count: _holds(plan, model, length, replace(options, max_num_seqs=count)), seqs):
            ways.insert(0, f"--max-num-seqs {fewer}")  # for all of it
        if model.kv_dtype.itemsize > 1:
            ways.append("--kv-cache-dtype fp8, which makes room for about twice as many")
        what += f" has room for {plan.context:,} tokens, so the context is that instead of {length:,}: use {' or '.join(ways)}"
        warn(f"{what}; {plan.others}" if plan.others and options.kv_bytes is None else what, RuntimeWarning)
    return plan


def sequences_that_fit(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest power of two below `most` for which `fits`; None: not even 1 does. With fewer sequences, their states, and so
    the prefix cache's, leave room for KV pages."""
    counts = [1 << i for i in reversed(range((most - 1).bit_length()))]
    return next(filter(fits, counts)) if counts and fits(1) else None


def _holds(plan: MemoryPlan, model: Model, length: int, options: LoadOptions) -> bool:
    """Whether all `length` positions fit with other options, if steps take as much as in `plan`."""
    options = replace(options, max_num_batched_tokens=plan.max_num_batched_tokens)
    return plan_memory(model, length, model.device, options, step_bytes=lambda limits: plan.step).context == length


def does_not_fit(plan: MemoryPlan, device: str, hint: str) -> OutOfMemoryError:
    """The error for a plan that does not fit."""
    if plan.only_context_is_short:
        what = f"{context_is_short(plan)}{f'; {plan.others}' if plan.others else ''}"
        return OutOfMemoryError(what, where=f"--max-model-len {plan.asked}", hint=hint)
    parts = ", ".join(f"{what} {format_size(size)}" for what, size, _ in plan.rows() if what != "KV cache")
    if plan.page:
        pages = max(plan.pages, plan.least_pages)
        parts += f" and {pages:,} KV page{'s' * (pages > 1)} {format_size(pages * plan.page)}"
    free, expected = f"{format_size(plan.free)} free", format_size(plan.needed, up=True)
    if plan.budget < plan.free:
        free = f"{format_size(plan.budget)}, {plan.budget / plan.free:.0%} of {free}"
    if plan.others:
        free += f" ({plan.others})"
    return OutOfMemoryError(f"the model does not fit: {parts}", where=device, expected=expected, found=free, hint=hint)


def context_is_short(plan: MemoryPlan) -> str:
    """What is wrong with a plan of which `only_context_is_short`."""
    needed, room = format_size(plan.least_pages * plan.page, up=True), format_size(plan.pages * plan.page)
    return f"a context of {plan.asked:,} tokens needs {needed} of KV cache, which has room for {room}, {plan.context:,} tokens"


def estimate_step(model: Model, limits: EngineLimits, cuda_graphs: bool, device: AnyDevice) -> int:
    """An estimate of the bytes that steps need on a GPU beside weights and KV pages; see `measure_step_bytes`."""
    config, size, length, tokens = model.config, model.dtype.itemsize, limits.max_model_len, limits.max_num_batched_tokens
    rows = limits.max_logits_rows if limits.max_drafts else limits.max_num_seqs
    row = (2 * config.hidden_size + max(layer.activation_values for layer in model.layers)) * size
    if model.adapters is not None:  # y of a linear; gate and up before their activation, if adapters are added after the product
        gated = (op.linear for layer in model.layers for op in layer.linear_ops() if op.gated and not op.experts)
        row += max((linear.out_features for linear in gated if linear.format is not None), default=0) * size
        row += model.adapters.activation_values() * size
    logits = rows * config.vocab_size * 4
    slot = slot_bytes(config.vocab_size, length) + 4 * (-(-length // PAGE_SIZE) + limits.keeps_history * length)
    total = tokens * row + 3 * logits + min(rows, PROCESSED_ROWS) * config.vocab_size * 4 + limits.max_num_seqs * slot
    if cuda_graphs:
        total += min(tokens, 2048) * row
    if tokens > INT4_MAX_TOKENS and compute_capability(device) != (9, 0):
        linears = [op.linear for layer in model.layers for op in layer.linear_ops() if not op.experts]
        total += max((each.num_parameters for each in linears if each.format and each.format.unpacks), default=0) * size
    if model.draft_model is not None:  # the hidden states that it continues from
        total += tokens * config.hidden_size * size
    return int(1.05 * total)


@contextmanager
def out_of_memory_while(what: str, device: torch.device) -> Iterator[None]:
    """Turn PyTorch's out-of-memory errors into an `OutOfMemoryError`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        line, hint = str(error).strip().partition("\n")[0], "lower --gpu-memory-utilization, or free memory"
        raise OutOfMemoryError(f"no memory left while {what}", where=str(device), found=line, hint=hint) from error


def _pages_in(memory: int, page: int) -> int:
    page = max(page, 1)
    if memory < page:
        expected = f"{format_size(page, up=True)} (one page) or more"
        raise ConfigError("too small", where="--kv-cache-memory", expected=expected, found=format_size(memory))
    return memory // page
