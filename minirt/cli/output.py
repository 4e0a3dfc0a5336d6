"""Output of the commands: results on stdout, notes on stderr, and a completion as a record or a summary."""

import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from minirt.errors import MinirtError, printable
from minirt.sizes import format_size

if TYPE_CHECKING:
    from minirt.engine.request import TokenLogprobs
    from minirt.generator import Generator
    from minirt.outputs import Completion


_END = 32  # characters that are the end of a text


def write(text: str) -> None:
    """Write results to stdout and flush. `process.standard_streams` says what happens if stdout is full or closed."""
    sys.stdout.write(text)
    sys.stdout.flush()


def printable_lines(text: str) -> str:
    """`text` with all that is not printable escaped, except newlines: a name from a file must not control the terminal."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(text: str) -> str:
    """`text` on one line, with all that is not printable escaped."""
    return printable(re.sub(r"\s*\n\s*", " ", text.strip()))


def json_line(record: dict[str, Any]) -> str:
    """A record as one line of JSON. Non-ASCII characters are escaped if stdout's encoding cannot represent them."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    return text + "\n"


def emit(text: str, target: str | None, quiet: bool) -> None:
    """Write results to the file `target`, or to stdout if it is None. On a terminal, names in them cannot control it."""
    with results_in(target, quiet):
        write(printable_lines(text) if sys.stdout.isatty() else text)


@contextmanager
def results_in(target: str | None, quiet: bool) -> Iterator[None]:
    """Context in which `write` writes to the file `target`, or to stdout if it is None."""
    if target is None:
        yield
        return
    try:
        with open(target, "w", encoding="utf-8") as file, redirect_stdout(file):
            yield
    except OSError as error:
        raise MinirtError(f"cannot write the results: {error.strerror}", where=target) from error
    if not quiet:
        note(f"results in {target}")


def note(text: str) -> None:
    """Print a note for the user on stderr."""
    click.secho(printable_lines(text), file=sys.stderr, dim=sys.stderr.isatty())


def note_template(generator: "Generator", completions: Sequence["Completion"], quiet: bool) -> None:
    """After prompts that were not chat messages: say so if the model has a chat template. Warn if texts are empty."""
    if not completions or generator.tokenizer is None or not generator.tokenizer.has_chat_template:
        return
    texts = [completion for completion in completions if completion.sampling.detokenize]
    if empty := sum(completion.finish_reason == "stop" and not completion.text.strip() for completion in texts):
        what = "the text is empty" if len(texts) == 1 else f"{empty} of {len(texts)} texts are empty"
        warnings.warn(f"{what}; the model has a chat template that was not applied: --chat applies it", stacklevel=2)
    elif not quiet:
        note("the model has a chat template that was not applied: --chat applies it")


def warn_incomplete(completions: Sequence["Completion"]) -> None:
    """Warn of structured texts that were cut: such a text is no whole JSON, for example."""
    if cut := [one for one in completions if one.finish_reason == "length" and one.sampling.structured_outputs is not None]:
        what = "the text is incomplete" if len(completions) == 1 else f"{len(cut)} of {len(completions)} texts are incomplete"
        limits = {one.sampling.max_tokens for one in cut if len(one.token_ids) >= one.sampling.max_tokens}
        end = f"--max-tokens {', '.join(map(str, sorted(limits)))}" if limits else "the end of the context"
        hint = ""
        if any(_ends_blank(completion) for completion in cut):
            hint = "; small models may spend their tokens on white space, as here: --disable-any-whitespace forbids it"
        warnings.warn(f"{what}: {end} came before the end of the structured output{hint}", stacklevel=2)


def _ends_blank(completion: "Completion") -> bool:
    """Whether the end of a JSON text is mostly white space that an option would forbid."""
    spec, end = completion.sampling.structured_outputs, completion.text[-_END:]
    may = spec is not None and (spec.json_object or spec.json is not None) and not spec.disable_any_whitespace
    return may and 2 * sum(map(str.isspace, end)) > len(end)


@dataclass(frozen=True)
class Printing:
    """How results are printed. `verbose`: in JSON with all sampling values. `quiet`: without notes."""

    as_json: bool
    verbose: bool
    quiet: bool

    def line(self, generator: "Generator", request: dict[str, Any], completion: "Completion", several: bool) -> str:
        """A completion as a line for stdout. `request`: the fields of JSON that describe it. `several`: it is one of samples.

        On a terminal, the text of one of several samples has its number above; files and pipes get the text alone. Without a
        text, the line has the token ids.
        """
        if self.as_json:
            return record_line(request, completion, several, self.verbose, generator.speculative is not None)
        texts = generator.tokenizer is not None and completion.sampling.detokenize
        text = completion.text if texts else " ".join(map(str, completion.token_ids))
        return (click.style(f"sample {completion.index}\n", dim=True) if several and sys.stdout.isatty() else "") + text + "\n"


def record_line(request: dict[str, Any], completion: "Completion", several: bool, verbose: bool, drafts: bool) -> str:
    """What --json prints for a completion, after the fields of its request. Missing values are null.

    `several`: with the number of the sample. `verbose`: with all sampling values and their sources; otherwise only the seed of
    random draws. `drafts`: whether there may be drafts, whose numbers are then printed, also if they are 0.
    """
    record = request | ({"sample": completion.index} if several else {})
    fields = "prompt_token_ids", "token_ids", "text", "finish_reason", "cached_tokens"
    numbers = "time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes"
    record |= {name: getattr(completion, name) for name in fields} | {name: getattr(completion, name) or None for name in numbers}
    if completion.error is not None:
        record["error"] = str(completion.error)
    if completion.logprobs is not None:
        record["cumulative_logprob"] = finite(completion.cumulative_logprob)
    for name in ("logprobs", "prompt_logprobs"):
        if (rows := getattr(completion, name)) is not None:
            record[name] = [None if row is None else logprobs_record(row) for row in rows]
    effective = completion.sampling
    if effective.temperature > 0:
        record["seed"] = effective.seed
    if drafts:
        record |= {name: getattr(completion, name) for name in ("num_draft_tokens", "num_accepted_tokens", "acceptance_length")}
    if verbose:
        record["sampling"] = {name: getattr(effective, name) for name in effective.sources}
        if effective.structured_outputs is not None:
            record["sampling"]["structured_outputs"] = effective.structured_outputs.stated()
        record["sampling_sources"] = effective.sources
    return json_line(record)


def logprobs_record(row: "TokenLogprobs") -> dict[str, Any]:
    """The log-probabilities of one token."""
    top = [[token, finite(logprob)] for token, logprob in row.top]
    return {"token_id": row.token_id, "logprob": finite(row.logprob), "rank": row.rank, "top": top}


def finite(number: float | None) -> float | None:
    """A number for JSON, which has no infinity: null in its place."""
    return number if number is not None and math.isfinite(number) else None


def load_summary(generator: "Generator") -> str:
    """The times of loading and warm-up, the read rate, on a CPU the number of threads, and whether a model with recurrent layers
    has no prefix cache."""
    text = f"load {generator.load_time_s:.2f} s"
    if generator.bytes_read:
        rate = generator.bytes_read / generator.load_time_s
        text += f" ({format_size(generator.bytes_read)} at {rate / 1e9:.2f} GB/s)"
    if generator.warm_up_time_s > 0.01:
        text += f", warm-up {generator.warm_up_time_s:.2f} s"
    if generator.device.type == "cpu":
        import torch

        text += f" · {counted(torch.get_num_threads(), 'thread')}"
    return text + (" · no prefix cache" if generator.memory.state and generator.prefix_cache_stats is None else "")


def counted(number: int, noun: str) -> str:
    """"1 token", "2 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def completion_summary(generator: "Generator", samples: Sequence["Completion"]) -> str:
    """The times, rates and settings of a prompt's samples, which run together. The bandwidth counts weight bytes only."""
    completion, prompt = samples[0], len(samples[0].prompt_token_ids)
    first, times = completion.time_to_first_token_s, [sample.token_times_s for sample in samples if sample.token_times_s]
    seconds = max((series[-1] for series in times), default=0.0) - min((series[0] for series in times), default=0.0)
    rate = sum(len(series) - 1 for series in times) / seconds if seconds > 0 else 0.0
    speed = f"prompt {counted(prompt, 'token')}"
    if first:  # else no token was asked for
        speed = f"first token {first:.3f} s · {speed}, {prompt / first:.1f} tokens/s"
    count = sum(len(sample.token_ids) for sample in samples)
    decode = f"decode {counted(count, 'token')}"
    decode += f" of {len(samples)} samples" if len(samples) > 1 else ""
    if rate:  # else there was no step after the prompt's
        decode += f", {rate:.1f} tokens/s"
        if len(samples) == 1 and not completion.num_draft_tokens:  # else a step yields several tokens
            decode += f", {rate * generator.decode_read_bytes / 1e9:.1f} GB/s of weights"
    decode = f"{decode} · " if count else ""  # a prompt that is only scored decodes nothing
    ends = Counter(str(sample.finish_reason) for sample in samples)
    each = [f"{reason} ({counted(number, 'sample')})" if len(ends) > 1 else reason for reason, number in ends.items()]
    lines = [
        f"{load_summary(generator)} · {speed}",
        f"{decode}peak memory {format_size(max(sample.peak_memory_bytes for sample in samples))} · finished: {', '.join(each)}",
        f"{completion.sampling.describe()} · at most {completion.sampling.max_tokens} new tokens "
        f"({completion.sampling.sources.get('max_tokens', 'default')})",
    ]
    if generator.speculative is not None:
        lines.append(drafts_summary(generator, samples))
    return "\n".join([*lines, not_applied(completion)]).rstrip("\n")


def drafts_summary(generator: "Generator", completions: Sequence["Completion"]) -> str:
    """How many drafts were verified and accepted."""
    drafted = sum(completion.num_draft_tokens for completion in completions)
    accepted = sum(completion.num_accepted_tokens for completion in completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    why = "they were not expected to pay" if generator.draft_stats.num_proposals else "nothing was proposed"
    text = f"drafts: {accepted:,} of {drafted:,} accepted" if drafted else f"drafts: none were verified, as {why}"
    if drafted and tokens > accepted:
        text += f", {tokens / (tokens - accepted):.2f} tokens per step of a sequence"
    if any(name.startswith("fp8") for name in generator.plan.formats):
        text += " · fp8: a single token has 16-bit activations, a step with drafts mostly fp8 ones"
    return text


def not_applied(completion: "Completion") -> str:
    """A line with the settings of generation_config.json that minirt does not support; "" if there are none."""
    ignored = ", ".join(completion.sampling.not_applied)
    return f"ignored from generation_config.json, not supported: {ignored}" if ignored else ""
