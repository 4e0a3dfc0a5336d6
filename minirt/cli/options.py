"""Shared by the commands: groups of options, their parsing, and `open_model`, which loads the model that they name.

This module is light: heavy imports wait until a command needs them.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from minirt.cli.files import check_target, read_text, shown_name
from minirt.cli.help import MODEL_ARGUMENT, option_group
from minirt.cli.output import note
from minirt.errors import ConfigError, InputError, MinirtError, TokenizerError, UnsupportedError, inside
from minirt.gpus import AbsentGPU, find_gpu
from minirt.progress import load_bars
from minirt.sizes import parse_count, parse_size
from minirt.user_code import import_file

if TYPE_CHECKING:
    from minirt.generator import Generator
    from minirt.loading.options import LoadOptions
    from minirt.sampling_params import SamplingParams
    from minirt.speculative.options import SpeculativeOptions


class Numbers(click.ParamType):
    """"1,8,64" → (1, 8, 64): positive integers. With `separator=":"` a range: "32:512" → (32, 512), and "64" → (64, 64). With
    `zero`, "0" → (), none."""

    def __init__(self, name: str, separator: str, zero: bool = False) -> None:
        self.name, self._separator, self._zero = name, separator, zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if self._zero and value.strip() == "0":
            return ()
        words = [word.strip() for word in value.split(self._separator)]
        numbers = tuple(int(word) for word in words if re.fullmatch("0{0,9}[1-9][0-9]{0,8}", word))
        if len(numbers) != len(words):
            self.fail(f"{value!r} is not a list of positive integers separated by {self._separator!r}", param, ctx)
        if self._separator == ":":
            numbers = numbers * 2 if len(numbers) == 1 else numbers
            if len(numbers) != 2 or numbers[0] > numbers[1]:
                self.fail(f"{value!r} is not a range LOW:HIGH", param, ctx)
        return numbers


class TokenIds(click.ParamType):
    """"0,17" → (0, 17)."""

    name = "ID,ID,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
            self.fail(f"{value!r} is not token ids with ',' between", param, ctx)
        return tuple(map(int, words))


class Bias(click.ParamType):
    """"17=-5.5" → (17, -5.5)."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,18})=([+-]?[0-9]{1,9}(?:\.[0-9]{0,18})?)", value.strip())
        if not match:
            self.fail(f"{value!r} is no token id and number, such as 17=-5.5", param, ctx)
        return int(match[1]), float(match[2])


class JsonObject(click.ParamType):
    """'{"a": 1}' → {"a": 1}."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = value if isinstance(value, dict) else json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return found


CHAT_MODEL = "SmolLM2-135M-Instruct"  # small enough for a CPU
NUMBERS, RANGE = Numbers("N,N,…", ","), Numbers("LOW:HIGH", ":")


class Size(click.ParamType):
    """"512MiB" → bytes: see `parse_size`."""

    name = "SIZE"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value, self._least)
        except InputError as error:
            self.fail(str(error), param, ctx)


class TokenCount(click.ParamType):
    """"32k" → 32000: see `parse_count`. With `auto`, that word is None: the option's default."""

    name = "TOKENS"

    def __init__(self, least: int | None = None, auto: bool = False) -> None:
        self._least, self._auto = least, auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if self._auto and value == "auto":
            return None
        try:
            count = value if isinstance(value, int) else parse_count(value)
        except InputError as error:
            self.fail(str(error) + (", or auto" if self._auto else ""), param, ctx)
        if self._least is not None and count < self._least:
            self.fail(f"{count} is not in the range x>={self._least}", param, ctx)
        return count


model_options = option_group(
    "Model",
    click.option(
        "--model", "-m", envvar="MINIRT_MODEL",
        help="Folder, Hub id or preset. Also from MINIRT_MODEL. Default: the embedded model, a small story teller.",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option("--dtype", default="auto", show_default=True, help="auto, bfloat16, float16 or float32."),
    click.option(
        "--quantize", type=click.Choice(("fp8", "int4")),
        help="Quantize the weights of all linear layers while they are loaded, to FP8 or to 4 bits.",
    ),
    click.option("--fp8", is_flag=True, help="The same as --quantize fp8."),
    click.option(
        "--quantize-head/--no-quantize-head", "--fp8-head/--no-fp8-head", "quantize_head", default=None,
        help="With --quantize: quantize the LM head too. [default: with fp8, unless it is tied to the embedding]",
    ),
    click.option("--revision", help="Branch, tag or commit of a Hub model."),
    click.option("--impl", multiple=True, help="Implementation: NAME for all layers, or GLOB=NAME (repeatable)."),
    click.option(
        "--import", "imports", multiple=True, metavar="FILE",
        help="Run a Python file first, which registers implementations for --impl, or models (repeatable).",
    ),
)


def model_argument(command: Callable) -> Callable:
    """Decorator: the value of --model may also be given as an argument, as in `vllm serve MODEL`."""

    @click.argument(MODEL_ARGUMENT, required=False, metavar="[MODEL]")
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        options["model"] = options.pop(MODEL_ARGUMENT) or options["model"]
        return command(*arguments, **options)

    return run


gpu_option = option_group(
    "Model",
    click.option(
        "--gpu", callback=lambda context, parameter, value: None if value is None else find_gpu(value),
        help="A GPU that is not in this machine: its name, such as H200, or its memory, such as 24GiB, or 24GiB:8.9 with its "
        "compute capability (default: 8.0, which has no FP8).",
    ),
)


def planned_gpu(options: dict[str, Any]) -> AbsentGPU | None:
    """The GPU of `--gpu`, which excludes a device of this machine other than "cuda"."""
    if options["gpu"] is not None and options["device"] not in ("auto", "cuda"):
        raise click.UsageError(f"--gpu is a GPU that is not here, and --device {options['device']} is a device that is")
    return options["gpu"]


kv_cache_dtype_option = option_group(
    "Memory and speed",
    click.option("--kv-cache-dtype", default="auto", show_default=True, help="auto (as --dtype) or fp8."),
)
# These decide what a model takes of the memory, so `minirt plan` has them, too.
memory_options = option_group(
    "Memory and speed",
    click.option(
        "--max-model-len", type=TokenCount(auto=True), help="Positions to serve; 32K is 32,768 and 32k is 32,000. Default, and "
        "auto: the model's own, or as many as fit. A number that does not fit is refused.",
    ),
    click.option(
        "--max-num-seqs", type=click.IntRange(1), default=64, show_default=True,
        help="Maximum number of sequences in one step; further requests wait. It sizes the KV cache and the CUDA graphs.",
    ),
    click.option(
        "--gpu-memory-utilization", type=float,
        help="The share of a GPU's free memory that weights, KV pages and steps may take; default: 0.9.",
    ),
    click.option(
        "--kv-cache-memory", type=Size(),
        help="Memory for KV pages, e.g. 4GiB; never more than --max-num-seqs sequences of full length need.",
    ),
    kv_cache_dtype_option,
    click.option(
        "--max-num-batched-tokens", type=TokenCount(1),
        help="Maximum number of tokens in one step. Longer prompts are computed in chunks, beside decoding requests. Default: "
        "8,192 on a GPU, less where the memory is short; 256 on a CPU.",
    ),
    click.option(
        "--no-cuda-graphs", "--enforce-eager", is_flag=True,
        help="On a GPU: launch every kernel from the host instead of replaying CUDA graphs. --enforce-eager is vLLM's name for "
        "this; it does not select eager layers: use --impl eager.",
    ),
    click.option(
        "--state-cache-memory", type=Size(least=0),
        help="Memory for states of recurrent layers (Qwen3.5, 3.6, 3.8) that the prefix cache keeps; 0: no prefix cache. "
        "Default: a quarter of the memory for them and KV pages, at most four states for each sequence.",
    ),
)
random_weights_option = option_group(
    "Model", click.option("--random-weights", is_flag=True, help="Random weights: no download for a preset."),
)  # fmt: skip
load_options = option_group(
    "Memory and speed",
    model_options,
    random_weights_option,
    option_group("Model", click.option("--check-weights", is_flag=True, help="Fail if the checkpoint contains NaN or Inf.")),
    memory_options,
    click.option(
        "--max-step-ms", type=click.FloatRange(0),
        help="On a GPU: milliseconds that a step may spend on prompts while other requests decode; 0: no limit. Default: 60.",
    ),
    click.option("--max-waiting", type=click.IntRange(0), help="Requests that may wait; more are refused. Default: no limit."),
    click.option(
        "--threads", type=click.IntRange(1),
        help="CPU threads. Default: OMP_NUM_THREADS, or the CPUs that this process may use (affinity and cgroup quota).",
    ),
    click.option(
        "--no-warmup", is_flag=True,
        help="On a GPU: no warm-up at load. Loading is faster; kernels are compiled and CUDA graphs captured at their first use.",
    ),
)
prefix_cache_option = option_group(
    "Memory and speed",
    click.option(
        "--no-prefix-cache", is_flag=True,
        help="Compute every prompt completely, even if the KV cache holds its beginning from an earlier request.",
    ),
)
speculative_options = option_group(
    "Memory and speed",
    click.option(
        "--speculate", metavar="ngram[:k]|mtp[:k]",
        help="Speculative decoding: propose up to k tokens and verify them in one step. The distribution of the output stays the "
        "same. ngram (default k: 4): tokens that followed the same tokens before. mtp (default k: 3): tokens by the layers of "
        "multi-token prediction of Qwen3.5 (also 3.6, 3.8) and Qwen3-Next.",
    ),
    click.option(
        "--speculative-config", metavar="JSON",
        help='The same with the keys of vLLM: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}. Of mtp also "draft_vocab_size" (default 32768; 0: all) and "draft_vocab_text", a file.',
    ),
)
warm_prompt_option = option_group(
    "Memory and speed",
    click.option(
        "--warm-prompt", "warm_prompts", multiple=True, metavar="FILE",
        help="Compute a file's text at load and keep its KV pages, for prompts that begin with it (repeatable). For a chat: the "
        "beginning as the template writes it, without the special tokens that the tokenizer adds.",
    ),
)
chat_options = option_group(
    "Prompts",
    click.option("--chat", is_flag=True, help="Treat each prompt as a user message: apply the chat template."),
    click.option(
        "--system", metavar="TEXT", help="With --chat: the system message; an empty one replaces the template's default."
    ),
)
template_option = option_group(
    "Prompts",
    click.option(
        "--chat-template-kwargs", "variables", type=JsonObject(), metavar="JSON",
        help="More variables of the chat template, such as '{\"enable_thinking\": false}'. One that the template does not use is "
        "refused.",
    ),
)
# A distribution's filters, which the benchmarks also have.
filter_options = option_group(
    "Sampling",
    click.option("--top-p", type=float, help="Keep the most probable tokens up to this probability mass."),
    click.option("--top-k", type=int, help="Keep the k most probable tokens."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable, relative to the most probable token."),
)
_structured_options = option_group(
    "Structured output",
    click.option(
        "--json-schema", metavar="FILE", help="The text is JSON that the JSON schema in a file accepts; - is stdin. "
        "A value that begins with { is the schema itself.",
    ),
    click.option("--json-object", is_flag=True, help="The text is a JSON object."),
    click.option(
        "--disable-any-whitespace", is_flag=True,
        help="With --json-schema or --json-object: no white space between JSON tokens. Small models may waste tokens on it.",
    ),
    click.option(
        "--regex", help="The text is matched by a regular expression from its beginning to its end. \\d is any Unicode digit: "
        "write [0-9]."
    ),
    click.option("--choice", multiple=True, metavar="TEXT", help="The text is this one, or another --choice (repeatable)."),
    click.option("--grammar", metavar="FILE", help="The text follows the grammar in a file, in llguidance's Lark syntax."),
    click.option(
        "--reasoning-end", metavar="TEXT", help="Schema, regex, choice or grammar begin after this text, such as </think>."
    ),
)
sampling_options = option_group(
    "Sampling",
    click.option("--max-tokens", type=int, help="Maximum number of new tokens; default: 256."),
    click.option("--temperature", type=float, help="0 is greedy."),
    filter_options,
    click.option("--seed", type=int, help="Seed of sampling (and of random weights)."),
    click.option("--stop", multiple=True, help="End the text before this string, or at this special token (repeatable)."),
    click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token."),
    click.option("--min-tokens", type=int, help="New tokens before an end token or a stop string may end the text."),
    click.option("--stop-token-ids", type=TokenIds(), help="More tokens that end the text."),
    click.option("--include-stop-str-in-output", is_flag=True, help="Print also what ended the text: a stop string or a token."),
    click.option("--presence-penalty", type=float, help="Subtract this from the logits of generated tokens, -2 to 2."),
    click.option("--frequency-penalty", type=float, help="Subtract this for each time a token was generated, -2 to 2."),
    click.option("--repetition-penalty", type=float, help="Divide the positive logits of tokens seen by this; 1 is off."),
    click.option("--logit-bias", type=Bias(), multiple=True, help="Add a number to a token's logit (repeatable)."),
    click.option("--allowed-token-ids", type=TokenIds(), help="Draw no other tokens than these."),
    click.option("--bad-words", multiple=True, metavar="TEXT", help="Never generate this text (repeatable)."),
    _structured_options,
    option_group(
        "Output",
        click.option(
            "--skip-special-tokens/--no-skip-special-tokens", default=True, show_default=True,
            help="Leave special tokens out of the text.",
        ),
    ),
)
# For what prints results that are complete, also as JSON.
detail_options = option_group(
    "Output",
    option_group(
        "Sampling", click.option("--n", type=int, help="Samples of each prompt, each a result of its own. Default: 1.")
    ),
    option_group(
        "Prompts",
        click.option("--truncate-prompt-tokens", type=int, help="Keep this many last tokens of a prompt; -1: as many as fit."),
    ),
    click.option(
        "--logprobs", type=int,
        help="With --json: log-probabilities of new tokens, and of 0 to 20 of the most probable ones; -1: of all."
    ),
    click.option("--prompt-logprobs", type=int, help="With --json: the same for the prompt. --max-tokens 0 generates nothing."),
    click.option("--no-detokenize", is_flag=True, help="Make no text: print token ids."),
)
def output_format_option(*formats: str) -> Callable:
    """Decorator: `--output-format` with these choices, of which the first is the default, and `--json`, the same as `-o json`.

    The command gets `output_format`.
    """

    def decorate(command: Callable) -> Callable:
        @wraps(command)
        def run(*arguments: Any, as_json: bool, output_format: str, **options: Any) -> Any:
            source = click.get_current_context().get_parameter_source("output_format")
            if as_json and output_format != "json" and source is not ParameterSource.DEFAULT:
                raise click.UsageError(f"--json is --output-format json, and excludes --output-format {output_format}")
            return command(*arguments, output_format="json" if as_json else output_format, **options)

        choice = click.option(
            "--output-format", "-o", type=click.Choice(formats), default=formats[0], show_default=True,
            help="How to print the results.",
        )  # fmt: skip
        as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: the same as -o json.")
        return option_group("Output", as_json, choice)(run)

    return decorate


report_format_option = output_format_option("text", "md", "csv", "json", "jsonl")
text_format_option = output_format_option("text", "json")
output_file_option = option_group(
    "Output",
    click.option(
        "--output-file", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write the results to a file.",
        callback=lambda context, parameter, value: check_target(value, "--output-file"),
    ),
)  # fmt: skip
debug_option = option_group("General", click.option("--debug", is_flag=True, help="Show the traceback of an error."))
quiet_option = option_group("General", click.option("--quiet", "-q", is_flag=True, help="No progress and no summary."))


def require_chat(chat: bool, system: str | None, variables: dict[str, Any] | None) -> None:
    """Refuse `--system` and `--chat-template-kwargs` without `--chat`."""
    for name, value in (("--system", system), ("--chat-template-kwargs", variables)):
        if value is not None and not chat:
            raise click.UsageError(f"{name} needs --chat, which applies the chat template")


def sampling_params(options: dict[str, Any]) -> "SamplingParams":
    """`sampling_options` and `detail_options` as SamplingParams; InputError names the flag that is wrong."""
    from minirt.sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "min_tokens", "stop_token_ids",
             "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids",
             "skip_special_tokens")  # fmt: skip
    given = {name: options[name] for name in names} | {name: options[name] or None for name in ("stop", "bad_words")}
    given |= {name: options.get(name) for name in ("n", "truncate_prompt_tokens", "logprobs", "prompt_logprobs")}
    given["detokenize"] = not options.get("no_detokenize", False)
    given["structured_outputs"] = _structured_outputs(options)
    biases = dict(options["logit_bias"])
    if len(biases) < len(options["logit_bias"]):
        raise InputError("a token id appears twice", where="--logit-bias", found=list(options["logit_bias"]))
    try:
        return SamplingParams(logit_bias=biases or None, **given)
    except InputError as error:
        raise _by_options(error) from error


def _structured_outputs(options: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of StructuredOutputsParams that the options set."""
    fields: dict[str, Any] = {}
    if (schema := options["json_schema"]) is not None:
        fields["json"] = schema if schema.lstrip().startswith("{") else read_text(schema, "--json-schema")
    if options["grammar"] is not None:
        fields["grammar"] = read_text(options["grammar"], "--grammar")
    fields |= {name: options[name] for name in ("regex", "reasoning_end") if options[name] is not None}
    if options["choice"]:
        fields["choice"] = options["choice"]
    fields |= {name: True for name in ("json_object", "disable_any_whitespace") if options[name]}
    kinds = fields.keys() - {"reasoning_end", "disable_any_whitespace"}
    if fields and not kinds:
        flag = _flag_of(next(iter(fields)))
        raise click.UsageError(f"{flag} needs --json-schema, --json-object, --regex, --choice or --grammar")
    if len(kinds) > 1:
        raise click.UsageError("--json-schema, --json-object, --regex, --choice and --grammar exclude each other")
    return fields or None


def _flag(error: MinirtError) -> str:
    """The option that sets the sampling field which an error names, and the rest of its `where`."""
    field, comma, place = str(error.where).removeprefix("SamplingParams.").partition(", ")
    return f"{_flag_of(field.removeprefix('structured_outputs.'))}{comma}{place}"


def _flag_of(field: str) -> str:
    """The option that changes the field's default; of `structured_outputs` the one that was given."""
    if field == "structured_outputs":
        given = click.get_current_context().params
        field = next((kind for kind in ("json_schema", "json_object", "regex", "choice", "grammar") if given.get(kind)), field)
    names = {"json": "json-schema", "skip_special_tokens": "no-skip-special-tokens", "detokenize": "no-detokenize"}
    return "--" + names.get(field, field.replace("_", "-"))


def _by_options(error: MinirtError) -> MinirtError:
    """An error of a sampling field as the command line says it: with options in place of the names of fields."""
    from minirt.sampling_params import SamplingParams
    from minirt.structured.params import StructuredOutputsParams

    fields = {*SamplingParams.__dataclass_fields__, *StructuredOutputsParams.__dataclass_fields__}
    switched = {
        "detokenize is False": "--no-detokenize is given", "detokenize=True": "no --no-detokenize",
        "json or json_object": "--json-schema or --json-object",
    }  # fmt: skip

    def said(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        for name, option in switched.items():
            text = text.replace(name, option)
        return re.sub(r"(?<![\w-])[a-z]+(?:_[a-z]+)+\b", lambda name: _flag_of(name[0]) if name[0] in fields else name[0], text)

    field = str(error.where).removeprefix("SamplingParams.").removeprefix("structured_outputs.")
    what, hint = said(error.what.removeprefix(f"{field} ")), said(error.hint)
    return type(error)(what, where=_flag(error), expected=said(error.expected), found=error.found, hint=hint)


@contextmanager
def named_by_option(place: str | None = None, keys: Collection[str] = ()) -> Iterator[None]:
    """Context of a request: an error of a value that an option has set names the option, any other error `place`.

    `keys`: the sampling fields that the request sets itself. If there are any, an error of an option names the place as well,
    since the two may contradict each other.
    """
    try:
        yield
    except MinirtError as error:
        flags = {flag for own in click.get_current_context().command.params for flag in (*own.opts, *own.secondary_opts)}
        field = str(error.where).removeprefix("SamplingParams.").partition(", ")[0].partition(".")[0]
        named = error
        if not error.is_usage and field not in keys and _flag(error).partition(", ")[0] in flags:
            named = _by_options(error)
        if place is not None and (keys or not named.is_usage):
            named = named.at(f"{named.where}, {place}") if named.is_usage else named.within(place)
        if named is error:
            raise
        raise named from error


def model_name(options: dict[str, Any], quiet: bool = False) -> str:
    """The value of --model, else the embedded model. A note on stderr says so unless `quiet`."""
    if options["model"] is not None:
        return options["model"]
    if not quiet:
        note("no --model: this is the embedded model, which tells stories for small children")
    from minirt.models import EMBEDDED

    return EMBEDDED


def quantization(options: dict[str, Any]) -> str | None:
    """The format of `--quantize` or `--fp8`; None: neither is given."""
    if options.get("fp8") and options.get("quantize") not in (None, "fp8"):
        raise click.UsageError(f"--fp8 and --quantize {options['quantize']} exclude each other")
    return "fp8" if options.get("fp8") else options.get("quantize")


def to_load_options(options: dict[str, Any], name: str, **changes: Any) -> "LoadOptions":
    """LoadOptions for the model `name` from the parsed `model_options` or `load_options`. `changes` override them. Runs the files
    of `--import`.

    A "seed" among the options, such as that of `sampling_options`, is also the seed of random weights.
    """
    from minirt.loading.options import LoadOptions

    for file in options.get("imports", ()):  # not before: the command may have to prepare PyTorch and Triton
        import_file(file)
    return LoadOptions(**load_arguments(options, name, **changes))


def load_arguments(options: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of `LoadOptions`, as `to_load_options` takes them from the parsed options. Imports no torch."""
    quantize, head = quantization(options), options.get("quantize_head")
    if head is not None and quantize is None:
        raise click.UsageError("--quantize-head and --no-quantize-head need --quantize (or --fp8)")
    if options.get("random_weights") and options.get("check_weights"):
        raise click.UsageError("--check-weights and --random-weights exclude each other: random weights have no checkpoint")
    same = ("revision", "device", "dtype", "kv_cache_dtype", "kv_cache_memory", "state_cache_memory", "gpu_memory_utilization",
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_step_ms", "threads", "random_weights",
            "check_weights", "seed")  # fmt: skip
    chosen = {key: options[key] for key in same if options.get(key) is not None}
    chosen |= {"quantization": quantize, "quantize_head": head}
    if (speculative := _speculative(options)) is not None:
        chosen["speculative"] = speculative
    chosen |= {name: not options.get(f"no_{name}") for name in ("warmup", "cuda_graphs", "prefix_cache")}
    return {"model": name, "impl": list(options["impl"]) or "auto"} | chosen | changes


def _speculative(options: dict[str, Any]) -> "SpeculativeOptions | None":
    short, config = options.get("speculate"), options.get("speculative_config")
    if short is None and config is None:
        return None
    if short is not None and config is not None:
        raise click.UsageError("--speculate and --speculative-config exclude each other")
    from minirt.speculative.options import SpeculativeOptions

    return SpeculativeOptions.from_config(config) if config is not None else SpeculativeOptions.parse(str(short))


@contextmanager
def open_generator(options: "LoadOptions", quiet: bool) -> Iterator["Generator"]:
    """Load a model, with a progress bar on stderr unless `quiet`. The model is closed at the end."""
    from minirt.generator import Generator

    with load_bars(not quiet) as progress:
        generator = Generator.from_pretrained(options, progress=progress)
    with generator:
        yield generator


@contextmanager
def open_model(
    options: dict[str, Any], quiet: bool, prompts: Sequence[str] = (), chat: bool = False
) -> Iterator["Generator"]:
    """`open_generator` for the parsed `load_options`; without --model, the embedded model. Computes the --warm-prompt files.

    `prompts`, `chat`: what the model is for. It is not loaded if it has no tokenizer for this.
    """
    warm = [(name, read_text(name, "--warm-prompt")) for name in options.get("warm_prompts") or ()]
    name = model_name(options, quiet)
    load = to_load_options(options, name)
    if load.random_weights:
        from minirt.loading.load import find

        if find(name, load.revision, need_weights=False).files is None:  # a preset without its files
            if chat:
                hint = f"with --random-weights, {name} is not downloaded"
                raise TokenizerError("the model has no tokenizer for a conversation", where=name, hint=hint)
            for text in (*prompts, *(text for _, text in warm)):
                token_ids(name, text)
    with open_generator(load, quiet) as generator:
        for name, text in warm:
            with inside(shown_name(name)):
                kept = generator.warm_prompt(encode_prompt(generator, text, chat=False))
            if not quiet:
                note(f"{shown_name(name)}: {kept} tokens are kept for prompts that begin with them")
        yield generator


def require_tokenizer(generator: "Generator", flag: str) -> None:
    """Raise TokenizerError if the model has no tokenizer; for options that need a text."""
    if generator.tokenizer is None:
        raise TokenizerError("the model has no tokenizer for a text", where=flag, found=generator.name)


def prompt_limit(generator: "Generator", params: "SamplingParams | None") -> int | None:
    """The number of tokens above which a prompt is refused before it is tokenized; None: it will be truncated."""
    return generator.max_len - 1 if params is None or params.truncate_prompt_tokens is None else None


def encode_prompt(
    generator: "Generator", text: str, chat: bool, params: "SamplingParams | None" = None, system: str | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt of the command line. With `chat`, `text` is a user message, after the `system` message if any.

    `variables`: more variables of the chat template. Without a tokenizer, `text` is a list of ids such as "1 2 3".
    """
    most = prompt_limit(generator, params)
    if chat:
        if generator.tokenizer is not None and not generator.tokenizer.has_chat_template:
            hint = f"leave --chat out to complete the prompt as it is, or name a chat model, such as --model {CHAT_MODEL}"
            raise TokenizerError("the model has no chat template", where="--chat", found=generator.name, hint=hint)
        before = [] if system is None else [{"role": "system", "content": system}]
        return generator.encode_chat([*before, {"role": "user", "content": text}], most, variables)
    if generator.tokenizer is not None:
        return generator.encode(text, most)
    return token_ids(generator.name, text)


def token_ids(model: str, text: str) -> list[int]:
    """"1 2 3" → [1, 2, 3], for a model without a tokenizer."""
    words = text.replace(",", " ").split()
    if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        raise InputError(
            "the model has no tokenizer, so a prompt must be token ids", where=model,
            expected="integers, as in '1 2 3'", found=ascii(text[:80]),
        )
    return [int(word) for word in words]


def require_triton() -> None:
    """For a command that runs or reads Triton kernels."""
    from minirt.device import triton_installed

    if not triton_installed():
        raise MinirtError("Triton is not installed, and this command needs its kernels", hint="pip install triton")


def set_up_triton(cuda: bool, dtype: str | None) -> None:
    """On a CPU, make Triton use its interpreter. Must be called before Triton is imported.

    Raises:
        ConfigError: the interpreter is on, but the device is a GPU.
        UnsupportedError: the interpreter cannot run this dtype.
        MinirtError: Triton is already imported without its interpreter.
    """
    from minirt.device import interpreter_unsupported, interpreting

    require_triton()
    interprets = interpreting()
    reason = interpreter_unsupported(dtype or "auto", on_gpu=cuda)
    if cuda:
        if interprets:
            raise ConfigError(str(reason), where="TRITON_INTERPRET", hint="unset it")
        return
    if reason is not None:
        if dtype != "bfloat16":  # the dtype is not the reason
            raise UnsupportedError(reason)
        raise UnsupportedError(reason, where=f"--dtype {dtype}", expected="float32 or float16 on a CPU")
    if not interprets and "triton" in sys.modules:
        raise MinirtError("Triton is already imported without its interpreter", hint="run with TRITON_INTERPRET=1 set")
    os.environ["TRITON_INTERPRET"] = "1"
