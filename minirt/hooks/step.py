"""`StepHooks`: what the hooks of a model do within a step, and the states that it hands to the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import to_device
from minirt.errors import InputError
from minirt.hooks.capture import LOGITS, Captured, HostStates, as_bytes, matching
from minirt.hooks.layer import Hook
from minirt.hooks.processors import DrawnLogits
from minirt.layers import Layer
from minirt.sampling_params import EffectiveSampling
from minirt.step.batch import Batch
from minirt.step.plan import HookPlan, PlannedSequences


class CapturedRows(NamedTuple):
    """The states that a step has copied for its sequences, on the host or on their way there: [N, H] for each place."""

    plan: HookPlan
    states: Mapping[str, Tensor]

    def on_host(self) -> dict[str, HostStates]:
        """The states, when the step has ended."""
        return {name: HostStates(as_bytes(states), states) for name, states in self.states.items()}


class StepHooks:
    """The hooks of a model, and their buffers.

    Args:
        tokens, seqs: of the largest step, padding included.

    Attributes:
        places: what requests may ask for.
        edits: names of the edits.
    """

    def __init__(self, layers: Sequence[Layer], tokens: int, seqs: int, dtype: torch.dtype, device: torch.device) -> None:
        hooks = hooks_of(layers)
        self._capturing = {name: hook for hook in hooks if hook.captures for name in hook.names}
        self.places = list(self._capturing)
        self.edits = list(dict.fromkeys(name for hook in hooks for name in hook.edits))
        self._editing = next((hook for hook in hooks if hook.edits), None)  # the first one
        self._buffers = {
            hook: torch.zeros(tokens, hook.width, dtype=dtype, device=device) for hook in self._capturing.values()
        }  # fmt: skip
        self._device, self._cuda = device, device.type == "cuda"
        shape = len(self.edits), seqs
        self._factors = torch.zeros(shape, dtype=dtype, device=device)
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=self._cuda) for _ in range(2)]  # a step may still be queued
        self._of_rows = self._factors  # [edits, T], of the step that runs
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        # What the device has of the step before:
        self._sent_factors, self._sent_rows = np.zeros(shape, np.float32), (np.zeros((1, 0), np.int64), self._numbers)

    def check(self, sampling: EffectiveSampling) -> None:
        """Raise InputError if a request asks for what the model was not loaded with."""
        if sampling.capture is not None:
            try:
                matching(sampling.capture.states, self.places, "capture")
            except InputError as error:
                hint = f"load the model with capture={list(sampling.capture.states)}"
                raise InputError(error.what, where=error.where, expected=error.expected, found=error.found, hint=hint) from error
        if unknown := [name for name in sampling.steer if name not in self.edits]:
            hint = "load the model with edits={…}"
            expected = ", ".join(self.edits) or "no edit"
            raise InputError("not an edit of this model", where="steer", expected=expected, found=unknown[0], hint=hint)

    def plan(self, planned: PlannedSequences, sequences: Sequence[Any]) -> HookPlan:
        """What a step does for its sequences (`Sequence`, in order; None: it asks for nothing)."""
        owners, places, offsets, names = list[tuple[int, int, int]](), list[int](), list[int](), set[str]()
        factors = np.zeros((len(self.edits), len(planned.slots)), np.float32)
        starts, counts = planned.starts.tolist(), planned.num_tokens.tolist()
        for place, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            if sequence is None:
                continue
            for name, factor in sequence.sampling.steer.items():
                factors[self.edits.index(name), place] = factor
            captured: Captured | None = sequence.captured
            if captured is None or not captured.names:
                continue
            first, last = 0, count
            if start >= 0:
                wanted = captured.wanted(start, start + count)
                first, last = wanted.start - start, wanted.stop - start
            elif captured.asked.rows == "prompt":
                continue
            if first < last:
                owners.append((place, len(places), last - first))
                places += [place] * (last - first)
                offsets += range(first, last)
                names.update(captured.names)
        rows = np.array([places, offsets], np.int64)
        if planned.total_tokens == sum(count for start, count in zip(starts, counts, strict=True) if start >= 0 or count == 1):
            rows = (rows[1] + (planned.num_tokens.cumsum() - planned.num_tokens)[places])[None]
        return HookPlan(tuple(owners), rows, tuple(sorted(names)), factors)

    def send(self, plan: HookPlan) -> None:
        """Before a step."""
        if self.edits and not np.array_equal(plan.factors, self._sent_factors):
            self._hosts.reverse()
            host, count = self._hosts[0], plan.factors.shape[1]
            host[:, :count] = torch.from_numpy(plan.factors)
            host[:, count:] = 0
            self._factors.copy_(host, non_blocking=True)
            self._sent_factors = plan.factors

    def at(self, hook: Hook, x: Tensor, batch: Batch) -> Tensor:
        """What a hook does with the residual stream [T, H] of a step."""
        if hook is self._editing:
            ends, seqs = batch.query_starts_device[1:], batch.num_seqs
            places = torch.searchsorted(ends, self._numbers[: len(x)], right=True).clamp_(max=seqs - 1)
            self._of_rows = self._factors[:, places]
        for name, edit in hook.edits.items():
            factor = self._of_rows[self.edits.index(name)].unsqueeze(1)
            edited = edit(x, factor)
            if edited.shape != x.shape or edited.dtype != x.dtype:
                shown = f"{tuple(edited.shape)}, {edited.dtype}"
                raise InputError("an edit changed shape or dtype", where=f"edits {name!r}", expected=str(x.dtype), found=shown)
            x = torch.where(factor == 0, x, edited)
        if hook.captures:
            self._buffers[hook][: len(x)].copy_(x)
        return x

    def take(self, plan: HookPlan, batch: Batch) -> CapturedRows | None:
        """Queue the copy of a step's states to the host; None: it has none."""
        if not plan.owners:
            return None
        if not np.array_equal(plan.rows, self._sent_rows[0]):  # else those of the step before are there
            self._sent_rows = plan.rows, to_device(torch.from_numpy(plan.rows), self._device)
        rows, *offsets = self._sent_rows[1]
        if offsets:
            rows = (batch.query_starts_device[rows] + offsets[0]).clamp_(max=batch.num_tokens - 1)
        used = {self._capturing[name] for name in plan.names}
        copies = {hook: self._to_host(self._buffers[hook].index_select(0, rows)) for hook in used}
        return CapturedRows(plan, {name: copies[self._capturing[name]] for name in plan.names})

    def _to_host(self, states: Tensor) -> Tensor:
        if not self._cuda:
            return states
        return torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)


def captured_of(sampling: EffectiveSampling, prompt_len: int, hooks: StepHooks | None) -> Captured | None:
    """For the sequence of a request that has passed `check`; None: it asks for no states."""
    if (asked := sampling.capture) is None:
        return None
    names = [] if hooks is None else matching(asked.states, hooks.places, "capture")
    logits = DrawnLogits() if LOGITS in asked.places else None
    return Captured(asked, names, prompt_len, prompt_len + sampling.max_tokens, logits)


def hooks_of(layers: Sequence[Layer]) -> list[Hook]:
    """All hooks, in the order in which they run."""
    hooks = (layer if isinstance(layer, Hook) else layer.hook for layer in layers)
    return [hook for hook in hooks if hook is not None]


def step_hooks(model: object, tokens: int, seqs: int, device: torch.device) -> StepHooks | None:
    """The hooks of a model; None: it has none."""
    layers = getattr(model, "layers", ())
    if not hooks_of(layers):
        return None
    return StepHooks(layers, tokens, seqs, model.dtype, device)  # type: ignore[attr-defined]
