"""`StepHooks`: what the hooks of a model do within a step, and the states that it hands to the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import to_device
from minirt.errors import InputError
from minirt.hooks.capture import Captured, matching
from minirt.hooks.layer import Hook
from minirt.layers import Layer
from minirt.sampling_params import EffectiveSampling
from minirt.step.batch import Batch
from minirt.step.plan import HookPlan, PlannedSequences


class CapturedRows(NamedTuple):
    """The states that a step has copied for its sequences, on the host or on their way there: [N, H] for each place."""

    plan: HookPlan
    states: Mapping[str, Tensor]


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

    def check(self, sampling: EffectiveSampling) -> None:
        """Raise InputError if a request asks for what the model was not loaded with."""
        if sampling.capture is not None:
            try:
                matching(sampling.capture.places, self.places, "capture")
            except InputError as error:
                hint = f"load the model with capture={list(sampling.capture.places)}"
                raise InputError(error.what, where=error.where, expected=error.expected, found=error.found, hint=hint) from error
        if unknown := [name for name in sampling.steer if name not in self.edits]:
            hint = "load the model with edits={…}"
            expected = ", ".join(self.edits) or "no edit"
            raise InputError("not an edit of this model", where="steer", expected=expected, found=unknown[0], hint=hint)

    def captured(self, sampling: EffectiveSampling, prompt_len: int) -> Captured | None:
        """For a new sequence."""
        asked = sampling.capture
        return None if asked is None else Captured(asked, matching(asked.places, self.places, "capture"), prompt_len)

    def plan(self, planned: PlannedSequences, sequences: Sequence[Any]) -> HookPlan:
        """What a step does for its sequences (`Sequence`, in order; None: it asks for nothing)."""
        owners, places, offsets, names = list[tuple[int, int, int]](), list[int](), list[int](), set[str]()
        factors = np.zeros((len(self.edits), len(planned.slots)), np.float32)
        starts, counts = planned.starts.tolist(), planned.num_tokens.tolist()
        for place, sequence in enumerate(sequences):
            if sequence is None:
                continue
            for name, factor in sequence.sampling.steer.items():
                factors[self.edits.index(name), place] = factor
            captured: Captured | None = sequence.captured
            if captured is None:
                continue
            start, count = starts[place], counts[place]
            if start >= 0:
                wanted = captured.wanted(start, start + count)
                rows = range(wanted.start - start, wanted.stop - start)
            else:
                rows = range(0 if captured.asked.rows == "prompt" else count)
            if rows:
                owners.append((place, len(places), len(rows)))
                places += [place] * len(rows)
                offsets += rows
                names.update(captured.names)
        return HookPlan(tuple(owners), np.array([places, offsets], np.int64), tuple(sorted(names)), factors)

    def send(self, plan: HookPlan) -> None:
        """Before a step."""
        if self.edits:
            self._hosts.reverse()
            host, count = self._hosts[0], plan.factors.shape[1]
            host[:, :count] = torch.from_numpy(plan.factors)
            host[:, count:] = 0
            self._factors.copy_(host, non_blocking=True)

    def at(self, hook: Hook, x: Tensor, batch: Batch) -> Tensor:
        """What a hook does with the residual stream [T, H] of a step."""
        if hook is self._editing:
            ends, seqs = batch.query_starts_device[1:], batch.num_seqs
            rows = torch.arange(len(x), dtype=ends.dtype, device=x.device)
            self._of_rows = self._factors[:, torch.searchsorted(ends, rows, right=True).clamp_(max=seqs - 1)]
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
        places, offsets = to_device(torch.from_numpy(plan.rows), self._device)
        rows = (batch.query_starts_device[places] + offsets).clamp_(max=batch.num_tokens - 1)
        used = {self._capturing[name] for name in plan.names}
        copies = {hook: self._to_host(self._buffers[hook].index_select(0, rows)) for hook in used}
        return CapturedRows(plan, {name: copies[self._capturing[name]] for name in plan.names})

    def _to_host(self, states: Tensor) -> Tensor:
        if not self._cuda:
            return states
        return torch.empty(states.shape, dtype=states.dtype, pin_memory=True).copy_(states, non_blocking=True)


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
