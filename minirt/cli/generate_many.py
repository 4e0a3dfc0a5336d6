"""`minirt generate --prompts`: runs many requests through the engine at once; prints results in the order of the input."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minirt.cli import output
from minirt.cli.files import read_file, shown_name
from minirt.cli.options import named_by_option, open_model, sampling_params
from minirt.cli.process import finishing
from minirt.errors import InputError
from minirt.progress import prompt_bar
from minirt.sizes import format_size

if TYPE_CHECKING:
    from minirt.cli.request_file import PromptLine
    from minirt.generator import Generator
    from minirt.outputs import Completion, Samples


_SHOWN = 5  # line numbers in a message


@dataclass(frozen=True)
class Printing:
    """How results are printed. `verbose`: in JSON with all sampling values. `quiet`: without notes."""

    as_json: bool
    verbose: bool
    quiet: bool


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
        what = f"is for conversations, and {shown_name(name)} has none"
        raise InputError(what, where="--chat-template-kwargs", hint=hint)
    with open_model(options, printing.quiet, texts, chat or conversations) as generator:
        inputs = [request.encode(generator, chat, system, variables) for request in requests]
        results = _Results(
            requests, printing, texts=generator.tokenizer is not None, drafts=generator.speculative is not None
        )
        started = time.perf_counter()
        with output.results_in(options["output_file"], printing.quiet):
            try:
                _run(generator, inputs, results, printing.quiet)
            finally:
                with finishing():
                    seconds = time.perf_counter() - started
                    results.print_rest()
                    if results.all and not printing.quiet:
                        output.note(f"{output.load_summary(generator)} · {results.summary(seconds)}")
                        if generator.speculative is not None:
                            output.note(output.drafts_summary(generator, results.all))
                    output.warn_incomplete(results.all)
                    if not chat:
                        output.note_template(generator, results.plain, printing.quiet)
    failed = [request for request, done in zip(results.requests, results.all, strict=True) if done.error is not None]
    if failed:
        error = next(done.error for done in results.all if done.error is not None)
        what = f"{len(failed)} of {len(results.all)} requests failed: {error.what}"
        place = f"{shown_name(name)} {_lines([request.line for request in failed])}"
        raise type(error)(what, where=place, expected=error.expected, found=error.found, hint=error.hint)


def _run(generator: "Generator", inputs: list[list[int]], results: "_Results", quiet: bool) -> None:
    running = generator.completions(inputs, [request.params for request in results.requests])
    results.expect(running.all)
    with closing(running), prompt_bar(len(inputs), not quiet) as bar:
        for _, result in running:
            bar(n_finished=1, n_tokens=sum(len(completion.token_ids) for completion in result.outputs))
            with bar.hidden():
                results.print_ready()


class _Results:
    """All completions so far, and their printing in the order of the file. A finished one has a finish_reason."""

    def __init__(self, requests: "Sequence[PromptLine]", printing: Printing, texts: bool, drafts: bool) -> None:
        self.requests, self._printing, self._texts, self._drafts = requests, printing, texts, drafts
        self.all: list[Completion] = []
        self._samples: list[dict[str, int]] = []  # of each completion, which of several samples it is
        self._next = 0  # index of the first completion not printed yet

    def expect(self, results: "Sequence[Completion | Samples]") -> None:
        """Take each prompt's result, as it stands. From here on, every sample of a prompt counts as a request."""
        outputs = [result.outputs for result in results]
        self.requests = [request for request, samples in zip(self.requests, outputs, strict=True) for _ in samples]
        self._samples = [{"sample": i} if len(samples) > 1 else {} for samples in outputs for i in range(len(samples))]
        self.all = [completion for samples in outputs for completion in samples]

    def print_ready(self) -> None:
        """Print the finished completions up to the first unfinished one."""
        while self._next < len(self.all) and self.all[self._next].finish_reason is not None:
            self._print_next()

    def print_rest(self) -> None:
        """Print all other completions that are finished or have a token. Call when the run is over."""
        while self._next < len(self.all):
            self._print_next()

    def _print_next(self) -> None:
        request, sample, completion = self.requests[self._next], self._samples[self._next], self.all[self._next]
        self._next += 1  # before writing, so that after a Ctrl-C during the write nothing is printed twice
        if completion.finish_reason is None:
            if not completion.token_ids:
                return
            completion = replace(completion, finish_reason="abort")
        if self._printing.as_json:
            record = output.completion_record(completion, self._printing.verbose, self._drafts)
            output.write(output.json_line({**request.record(), **sample, **record}))
        else:
            texts = self._texts and request.params.detokenize
            text = completion.text if texts else " ".join(map(str, completion.token_ids))
            output.write(output.sample_text(text, completion.index) if sample else text + "\n")

    @property
    def plain(self) -> "list[Completion]":
        """The completions of prompts that are texts."""
        return [done for request, done in zip(self.requests, self.all, strict=True) if request.kind == "prompt"]

    def summary(self, seconds: float) -> str:
        """Totals of prompts, tokens and time, and the lines of unfinished and omitted requests."""
        everything = zip(self.requests, self.all, strict=True)
        # Without new tokens, max_tokens is 0.
        pairs = [(request, result) for request, result in everything if result.token_ids or result.prompt_logprobs]
        done, new = [result for _, result in pairs], sum(len(result.token_ids) for _, result in pairs)
        prompts = {request.line: len(result.prompt_token_ids) for request, result in pairs}  # samples share one
        text = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)} of {sum(prompts.values())} tokens"
        if len(done) > len(prompts):
            text += f" · {len(done)} samples"
        text += f" · {new} new tokens in {seconds:.2f} s, {new / seconds:.1f} tokens/s"
        if peak := max((completion.peak_memory_bytes for completion in self.all), default=0):
            text += f" · peak memory {format_size(peak)}"
        lines = [text, *sorted({output.not_applied(completion) for completion in done} - {""})]
        open_ = [(r.line, bool(c.token_ids)) for r, c in zip(self.requests, self.all, strict=True) if c.finish_reason is None]
        for what, begun in (("unfinished", True), ("left out", False)):
            if places := [line for line, has_tokens in open_ if has_tokens == begun]:
                lines.append(f"{what}: {_lines(places)}")
        return "\n".join(lines)


def _lines(numbers: "Sequence[int]") -> str:
    """"line 3", "lines 3, 4", or the first few and how many more there are."""
    numbers = list(dict.fromkeys(numbers))  # samples of one line
    text = ("lines " if len(numbers) > 1 else "line ") + ", ".join(map(str, numbers[:_SHOWN]))
    return f"{text} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else text
