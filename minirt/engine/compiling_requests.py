"""`CompilingRequests`: requests that wait for their token constraint, which is compiled beside the steps of others."""

from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from minirt.engine.request_checks import no_constraints
from minirt.engine.state.sequence import Sequence
from minirt.engine.token_constraints import TokenConstraint, TokenConstraints
from minirt.errors import EngineError, MinirtError

_WAIT_S = 0.005  # how long a step with nothing else to do waits


class CompilingRequests(dict[int, "Future[TokenConstraint]"]):
    """Open requests that are not in the scheduler yet, by id.

    Other threads compile, and announce what is done. So requests that are not done cost a step nothing.

    Args:
        constraints: compiles. None: requests with constraints end with an error.
    """

    def __init__(self, constraints: TokenConstraints | None) -> None:
        self._constraints = constraints
        self._done = deque[int]()  # those that are done; other threads append

    def add(self, sequence: Sequence, problem: MinirtError | None = None) -> bool:
        """Begin to compile the constraint of a new request. Returns False if it has none.

        Args:
            problem: with which the request ends, as if its constraint could not be compiled.
        """
        spec, future = sequence.sampling.structured_outputs, Future[TokenConstraint]()
        if problem is None and spec is None:
            return False
        if problem is not None:
            future.set_exception(problem)
        elif self._constraints is None:
            future.set_exception(no_constraints())
        elif spec is not None:
            future = self._constraints.prepare(spec, sequence.ends, sequence.sampling.min_tokens)
        self[sequence.id] = future
        return True

    def announce(self, request_id: int) -> None:
        """Have `done` yield a request once its constraint is there. Its request must be open by then."""
        done = self._done
        self[request_id].add_done_callback(lambda _: done.append(request_id))

    def done(self) -> Iterator[tuple[int, TokenConstraint | MinirtError]]:
        """Requests whose compilation has ended, each with its constraint or its error. The caller removes them."""
        while self._done:
            request_id = self._done[0]
            if (future := self.get(request_id)) is not None:  # else it was aborted, or announced twice
                error = future.exception()
                if error is None:
                    yield request_id, future.result()
                elif isinstance(error, MinirtError):
                    yield request_id, error
                else:
                    yield request_id, EngineError(f"a grammar could not be compiled: {error!r}")
            self._done.popleft()  # last, so that an exception of the caller loses no request

    def remove(self, request_id: int) -> bool:
        """Forget a request. Returns whether it was here; if so, its constraint is not compiled any more."""
        future = self.pop(request_id, None)
        if future is not None:
            future.cancel()
        return future is not None

    def keep(self, open_ids: Container[int]) -> None:
        """Forget all other requests, and announce these again. After an exception, at any line."""
        for request_id in tuple(self):
            if request_id in open_ids:
                self.announce(request_id)
            else:
                del self[request_id]

    def wait(self) -> None:
        """Wait a moment for one of them."""
        wait(self.values(), _WAIT_S, FIRST_COMPLETED)
