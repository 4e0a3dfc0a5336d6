"""`RankRunner`: a `Runner` whose steps run on all ranks."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from minirt.engine.execute.runner import Forward, Runner, StartedStep
from minirt.engine.execute.step_buffers import StepView
from minirt.layers.head import Head
from minirt.step.batch import Batch
from minirt.step.plan import StepPlan

_SPIN_SECONDS = 0.01  # without a pause


class _Watched(NamedTuple):
    """The end of a step, for which the ranks' time limit holds."""

    event: Any
    ranks: Any

    def synchronize(self) -> None:
        """Raises the error of a rank that has failed, also if the GPU never ends the step."""
        with self.ranks.waiting():
            start = time.monotonic()
            while not self.event.query():
                self.ranks.check()
                time.sleep(0.0 if time.monotonic() - start < _SPIN_SECONDS else 0.0001)


class RankRunner(Runner):
    """Tells the other ranks each part of a step before it does that part."""

    retries = False

    def start(self, plan: StepPlan) -> StartedStep:
        with self._ranks.step("start", plan):
            return self._watched(super().start(plan))

    def forward(self, plan: StepPlan) -> Forward:
        with self._ranks.step("forward", plan):
            return super().forward(plan)

    def draw(self, forward: Forward, process: Callable[[Tensor], Tensor] | None = None) -> StartedStep:
        masked, draws = forward.plan.sampling.masked, forward.plan.sequences.total_draws
        with self._ranks.step("draw", self.sampler.written_masks(draws) if masked else None):
            return self._watched(super().draw(forward, process))

    def _forward(self, plan: StepPlan) -> Forward:
        """After a step that stores row maxima, ranks gather logits only if the draw reads them: not within the CUDA graph."""
        forward, head = super()._forward(plan), self.model.layers[-1]  # type: ignore[attr-defined]
        if forward.row_maxima is None or not forward.needed or not (isinstance(head, Head) and head.sharded):
            return forward
        return forward._replace(logits=head.whole(forward.logits))

    def _without_cuda_graph(self, plan: StepPlan, *, settings: bool = True) -> tuple[StepView, Batch]:
        view, batch = super()._without_cuda_graph(plan, settings=settings)
        self.buffers.sent()  # also if the step is refused
        self._ranks.admit(self.model, self.cache, batch)
        return view, batch

    @property
    def _ranks(self) -> Any:
        return self.model.ranks  # type: ignore[attr-defined]  # it is a `Model` with ranks

    def _watched(self, step: StartedStep) -> StartedStep:
        ended: Any = None if step.ended is None else _Watched(step.ended, self._ranks)
        return step._replace(ended=ended)
