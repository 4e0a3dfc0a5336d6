"""`Sink`: takes the outputs of requests. `Sinks`: the sinks of open requests. `Port`: takes requests.

The engine's thread, an event loop of `AsyncGenerator` and the server's front each have `Sinks`. Imports no torch.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from minirt.engine.request import Request, TokenOutput
from minirt.errors import MinirtError


class Sink(Protocol):
    """Takes the outputs of its requests."""

    def put(self, outputs: list[TokenOutput], /) -> None:
        """Take outputs that arrive together. Must return soon and raise nothing, because the outputs of others wait meanwhile."""


class Port(Protocol):
    """An engine as its callers see it: the engine's thread, or what leads to it from an event loop or another process."""

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queue requests; all are added before the next step. Each one's last output has a `finish_reason`.

        Raises:
            MinirtError: the engine has ended.
        """

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests: no more outputs of them come. Does nothing for requests that have ended, or after the engine's end."""


class Sinks(dict[int, Sink]):
    """The sinks of open requests, by the ids of the requests."""

    def drop(self, request_ids: Iterable[int]) -> list[int]:
        """Deliver nothing more of these requests. Returns those that were open."""
        return [request_id for request_id in request_ids if self.pop(request_id, None) is not None]

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Deliver outputs, one list for each sink. A request is dropped only after its last output is delivered."""
        mail, ended = dict[Sink, list[TokenOutput]](), list[int]()
        for output in outputs:
            if (sink := self.get(output.request_id)) is not None:  # else it was aborted
                if sink in mail:
                    mail[sink].append(output)
                else:
                    mail[sink] = [output]
                if output.finish_reason is not None:
                    ended.append(output.request_id)
        for sink, letters in mail.items():
            sink.put(letters)
        self.drop(ended)

    def fail(self, request_ids: Iterable[int], error: MinirtError) -> None:
        """End open requests with an error: a copy for each, because one exception must not be raised in several threads."""
        self.deliver([TokenOutput(request_id, (), "error", error=error.copy()) for request_id in request_ids])
