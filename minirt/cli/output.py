"""How the commands print: results to stdout at once, notes to stderr, and a completion as a record or a summary."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minirt.errors import MinirtError

if TYPE_CHECKING:
    from minirt.generator import Generator
    from minirt.outputs import Completion


def write(text: str) -> None:
    """Send results on at once; a reader that has gone away (`| head`) ends the program without a word."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left fails once more at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise MinirtError(f"cannot write the output: {error.strerror}", where="stdout") from error


def json_line(record: dict[str, Any]) -> str:
    """A record as JSON, with characters as they are where stdout has them all, and escaped where it does not."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    return text + "\n"


def emit(text: str, target: str | None, quiet: bool) -> None:
    """Results to a file, or to stdout without one."""
    if target is None:
        write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MinirtError(f"cannot write the results: {error.strerror}", where=target) from error
    if not quiet:
        note(f"results in {target}")


def note(text: str) -> None:
    """A line for the person in front of the terminal, on stderr."""
    click.secho(text, err=True, dim=sys.stderr.isatty())


def format_bytes(count: float) -> str:
    """1234567 → "1.23 MB"; units are powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def completion_record(completion: "Completion") -> dict[str, Any]:
    """What --json prints of a completion, beside what its prompt was. A figure that there is none of is None."""
    record = {name: getattr(completion, name) for name in ("prompt_token_ids", "token_ids", "text", "finish_reason")}
    for name in ("time_to_first_token_s", "decode_tokens_per_s", "peak_memory_bytes"):
        record[name] = getattr(completion, name) or None
    if completion.error is not None:
        record["error"] = str(completion.error)
    effective = completion.sampling
    record["sampling"] = {name: getattr(effective, name) for name in effective.sources}
    record["sampling_sources"] = effective.sources
    return record


def load_summary(generator: "Generator") -> str:
    """How long loading and warming up took, and how fast it read."""
    text = f"load {generator.load_time_s:.2f} s"
    if generator.bytes_read:
        rate = generator.bytes_read / generator.load_time_s
        text += f" ({format_bytes(generator.bytes_read)} at {rate / 1e9:.2f} GB/s)"
    if generator.warm_up_time_s > 0.01:
        text += f", warm-up {generator.warm_up_time_s:.2f} s"
    return text


def completion_summary(generator: "Generator", completion: "Completion") -> str:
    """What one run took. The bandwidth counts weight bytes only."""
    first, rate = completion.time_to_first_token_s, completion.decode_tokens_per_s
    lines = [
        f"{load_summary(generator)} · first token {first:.3f} s · prompt {len(completion.prompt_token_ids)} tokens, "
        f"{len(completion.prompt_token_ids) / first:.1f} tokens/s",
        f"decode {len(completion.token_ids)} tokens, {rate:.1f} tokens/s, "
        f"{rate * generator.decode_read_bytes / 1e9:.1f} GB/s of weights · "
        f"peak memory {format_bytes(completion.peak_memory_bytes)} · finished: {completion.finish_reason}",
        f"{completion.sampling.describe()} · at most {completion.sampling.max_tokens} new tokens "
        f"({completion.sampling.sources.get('max_tokens', 'default')})",
    ]
    return "\n".join([*lines, not_applied(completion)]).rstrip("\n")


def not_applied(completion: "Completion") -> str:
    """What generation_config.json asks for in vain; empty if nothing."""
    ignored = ", ".join(completion.sampling.not_applied)
    return f"generation_config.json asks for, and minirt does not do: {ignored}" if ignored else ""
