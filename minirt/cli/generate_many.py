"""`minirt generate --prompts`: runs many requests through the engine at once; prints results in the order of the input."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minirt.cli import output
from minirt.cli.files import read_file, shown_name
from minirt.cli.options import named_by_option, open_model, sampling_params
from minirt.cli.output import Printing
from minirt.cli.process import finishing
from minirt.errors import InputError
from minirt.progress import prompt_bar
from minirt.sizes import format_size

if TYPE_CHECKING:
    from minirt.cli.request_file import PromptLine
    from minirt.generator import Generator
    from minirt.outputs import Completion

_SHOWN = 5  # line numbers in a message


def generate_many(
    name: str, options: dict[str, Any], printing: Printing, *, chat: bool, system: str | None, variables: dict[str, Any] | None
) -> None:
    """Run the requests of the JSON-lines file `name` ("-" is stdin) and print the results in the order of the file.

    All requests are checked before the first one runs. A result is printed as soon as all results before it are printed. On
    Ctrl-C, SIGTERM or SIGHUP, or on an error that ends the run, everything generated so far is printed, including unfinished
    texts, and the exception propagates. Requests without a token are left out.

    Raises:
        InputError, ContextLengthError, TokenizerError: a request is invalid; the error names file and line.
        MinirtError: some requests failed. Raised at the end, with the first one's error and the lines of the failed requests.
    """
    from minirt.cli.request_file import read_prompt_lines

    requests = read_prompt_lines(read_file(name, "--prompts"), shown_name(name), sampling_params(options))
    for request in requests if not printing.as_json else ():
        for key in ("logprobs", "prompt_logprobs"):
            if getattr(request.params, key) is not None:
                with named_by_option(request.place, request.keys):
                    raise InputError("needs --json, which prints them", where=key)
    texts = [str(request.content) for request in requests if request.kind == "prompt"]
    conversations = any(request.kind == "messages" for request in requests)
    if variables is not None and not chat and not conversations:
        hint = "--chat applies the chat template; so do messages"
        raise InputError(f"is for conversations, and {shown_name(name)} has none", where="--chat-template-kwargs", hint=hint)
    with open_model(options, printing.quiet, texts, chat or conversations) as generator:
        inputs = [request.encode(generator, chat, system, variables) for request in requests]
        results = _Results(printing, generator)
        started = time.perf_counter()
        with output.results_in(options["output_file"], printing.quiet):
            try:
                _run(generator, requests, inputs, results)
            finally:
                with finishing():
                    seconds = time.perf_counter() - started
                    completions = [completion for _, completion in results.rows]
                    results.print(rest=True)
                    if completions and not printing.quiet:
                        output.note(f"{output.load_summary(generator)} · {results.summary(seconds)}")
                        if generator.speculative is not None:
                            output.note(output.drafts_summary(generator, completions))
                    output.warn_incomplete(completions)
                    if not chat:
                        plain = [completion for request, completion in results.rows if request.kind == "prompt"]
                        output.note_template(generator, plain, printing.quiet)
    if failed := [(request, completion.error) for request, completion in results.rows if completion.error is not None]:
        what = f"{len(failed)} of {len(completions)} requests failed: {failed[0][1].what}"
        raise failed[0][1].changed(what=what, where=f"{shown_name(name)} {_lines([request.line for request, _ in failed])}")


def _run(generator: "Generator", requests: "Sequence[PromptLine]", inputs: list[list[int]], results: "_Results") -> None:
    running = generator.completions(inputs, [request.params for request in requests])
    pairs = zip(requests, running.all, strict=True)
    results.rows = [(request, completion) for request, result in pairs for completion in result.outputs]
    with closing(running), prompt_bar(len(inputs), not results.printing.quiet) as bar:
        for _, result in running:
            bar(n_finished=1, n_tokens=sum(len(completion.token_ids) for completion in result.outputs))
            with bar.hidden():
                results.print()


class _Results:
    """The samples of all requests so far, in the order of the file, and their printing. A finished one has a finish_reason."""

    def __init__(self, printing: Printing, generator: "Generator") -> None:
        self.printing, self._generator = printing, generator
        self.rows: list[tuple[PromptLine, Completion]] = []
        self._next = 0  # index of the first row not printed yet

    def print(self, rest: bool = False) -> None:
        """Print the finished completions up to the first unfinished one. `rest`: then all others that have a token."""
        while self._next < len(self.rows) and (rest or self.rows[self._next][1].finish_reason is not None):
            request, completion = self.rows[self._next]
            self._next += 1  # before writing, so that after a Ctrl-C during the write nothing is printed twice
            if completion.finish_reason is None:
                if not completion.token_ids:
                    continue
                completion = replace(completion, finish_reason="abort")
            output.write(self.printing.line(self._generator, request.record(), completion, request.params.n > 1))

    def summary(self, seconds: float) -> str:
        """Totals of prompts, tokens and time, and the lines of unfinished and omitted requests."""
        # Without new tokens, max_tokens is 0.
        pairs = [(request, result) for request, result in self.rows if result.token_ids or result.prompt_logprobs]
        done, new = [result for _, result in pairs], sum(len(result.token_ids) for _, result in pairs)
        prompts = {request.line: len(result.prompt_token_ids) for request, result in pairs}  # samples share one
        text = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)} of {sum(prompts.values())} tokens"
        if len(done) > len(prompts):
            text += f" · {len(done)} samples"
        text += f" · {new} new tokens in {seconds:.2f} s, {new / seconds:.1f} tokens/s"
        if peak := max(completion.peak_memory_bytes for _, completion in self.rows):
            text += f" · peak memory {format_size(peak)}"
        lines = [text, *sorted({output.not_applied(completion) for completion in done} - {""})]
        running = [(request.line, completion.token_ids) for request, completion in self.rows if not completion.finish_reason]
        for what, begun in (("unfinished", True), ("left out", False)):
            if places := [line for line, tokens in running if bool(tokens) == begun]:
                lines.append(f"{what}: {_lines(places)}")
        return "\n".join(lines)


def _lines(numbers: "Sequence[int]") -> str:
    """"line 3", "lines 3, 4", or the first few and how many more there are."""
    numbers = list(dict.fromkeys(numbers))  # samples of one line
    text = ("lines " if len(numbers) > 1 else "line ") + ", ".join(map(str, numbers[:_SHOWN]))
    return f"{text} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else text
