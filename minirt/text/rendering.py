"""`Renderer`: runs a chat template in a separate process, whose time and memory the operating system limits (`LimitedProcesses`).

A template is a program that comes with the model. Jinja's sandbox protects Python's internals, but does not prevent endless
loops, exponential texts or `'a' * 10**9`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from minirt.errors import shortened
from minirt.text.limited_processes import LimitedProcesses, ProcessLimits, Stopped

MAX_CPU_SECONDS = 5
MAX_SECONDS = 60
MAX_MEMORY = 1 << 30
MAX_OUTPUT = 1 << 20  # characters, in addition to four times those of the conversation and the other variables


class RenderingError(Exception):
    """The template failed, or was stopped. `str` says why. `stopped`: it took too much time, memory or output."""

    def __init__(self, text: str, stopped: bool = False) -> None:
        super().__init__(text)
        self.stopped = stopped


class Renderer:
    """Renders one template, from any thread. Threads that render at once use one process each."""

    def __init__(self, source: str) -> None:
        self._processes = LimitedProcesses(f"{__name__}:renders", source, ProcessLimits(MAX_CPU_SECONDS, MAX_SECONDS, MAX_MEMORY))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the template with these variables, JSON values. Raises a RenderingError if it fails or is stopped."""
        try:
            answer = self._processes.ask(variables)
        except Stopped as error:
            raise RenderingError(str(error), stopped=True) from None
        if "error" in answer:
            raise RenderingError(answer["error"], answer.get("stopped", False))
        return answer["text"]


def renders(source: str) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """The function of the process: from variables to the template's text or error."""
    template = None

    def answer(variables: dict[str, Any], size: int) -> dict[str, Any]:
        nonlocal template
        limit, length, pieces = MAX_OUTPUT + 4 * size, 0, list[str]()
        try:
            template = template or compile_template(source)
            for piece in template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > limit:
                    return {"error": f"it wrote more than {limit:,} characters", "stopped": True}
            return {"text": "".join(pieces)}
        except MemoryError:
            raise
        except Exception as error:  # the template is third-party code and can raise anything
            return {"error": shortened(f"{type(error).__name__}: {error}")}

    return answer


def compile_template(source: str) -> Any:
    """Compile the template in the same Jinja environment as transformers."""
    import functools
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # marks the text to train on; for inference a plain block

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
