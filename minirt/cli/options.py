"""Shared by the commands: groups of options, their parsing, and `open_model`, which loads the model that they name.

This module is light: heavy imports wait until a command needs them.
"""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from minirt.cli.files import check_target, read_text, shown_name
from minirt.cli.help import MODEL_ARGUMENT, option_group, option_in
from minirt.cli.output import note
from minirt.cli.settings import JSON_OBJECT, Parsed, biases, given, integers, option_of, options_of
from minirt.errors import ConfigError, InputError, MinirtError, TokenizerError, UnsupportedError, inside
from minirt.loading.options import EMBEDDED, LoadOptions
from minirt.progress import load_bars
from minirt.sampling_params import SamplingParams
from minirt.settings import settings_of
from minirt.structured.params import KINDS, StructuredOutputsParams
from minirt.user_code import import_file

if TYPE_CHECKING:
    from minirt.generator import Generator
    from minirt.speculative.options import SpeculativeOptions

_SAMPLING = settings_of(SamplingParams) | settings_of(StructuredOutputsParams)


def _numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    return integers(text, separator, "0{0,9}[1-9][0-9]{0,8}", f"a list of positive integers separated by {separator!r}")


def _range(text: str) -> tuple[int, ...]:
    numbers = _numbers(text, ":")
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise ValueError(f"{text!r} is not a range LOW:HIGH")
    return numbers[0], numbers[-1]


CHAT_MODEL = "SmolLM2-135M-Instruct"  # small enough for a CPU
NUMBERS = Parsed("N,N,…", _numbers)  # "1,8,64" → (1, 8, 64): positive integers
NUMBERS_OR_0 = Parsed("N,N,…", lambda text: () if text.strip() == "0" else _numbers(text))  # "0" → (), none
RANGE = Parsed("LOW:HIGH", _range)  # "32:512" → (32, 512), and "64" → (64, 64)

_load_options = partial(options_of, LoadOptions, title="Memory and speed")
_NO_ADAPTER = "--lora NAME=FOLDER: no request of this command names an adapter; use --lora FOLDER --merge"
model_option = option_of(LoadOptions, "model", "Model", envvar="MINIRT_MODEL", default=None, show_default=False)
model_options = option_group(
    "Model",
    model_option,
    _load_options("model", title="Model"),
    click.option(
        "--import", "imports", multiple=True, metavar="FILE",
        help="Run a Python file first, which registers implementations for --impl, or models (repeatable).",
    ),
)


# The value of --model may also be given as an argument, as in `vllm serve MODEL`.
model_argument = click.argument(MODEL_ARGUMENT, required=False, metavar="[MODEL]")
kv_cache_dtype_option = option_of(LoadOptions, "kv_cache_dtype", "Memory and speed")
random_weights_option = option_of(LoadOptions, "random_weights", "Model")
# These decide how much memory a model takes, so `minirt plan` also has them.
memory_options = _load_options("memory")
load_options = option_group(None, model_options, memory_options, _load_options("load"))
prefix_cache_option = _load_options("reuse")
speculative_options = option_group(
    "Memory and speed",
    _load_options("drafts"),
    click.option(
        "--speculative-config", metavar="JSON",
        help='The same with the keys of vLLM: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}. Of mtp also "draft_vocab_size" (default 32768; 0: all) and "draft_vocab_text", a file.',
    ),
)
# For commands that answer requests.
serving_options = option_group(None, load_options, prefix_cache_option, speculative_options)
warm_prompt_option = option_in(
    "Memory and speed", "--warm-prompt", "warm_prompts", multiple=True, metavar="FILE",
    help="Compute a file's text at load and keep its KV pages, for prompts that begin with it (repeatable). For a chat: the "
    "beginning as the template writes it, without the special tokens that the tokenizer adds.",
)  # fmt: skip
chat_options = option_group(
    "Prompts",
    click.option("--chat", is_flag=True, help="Treat each prompt as a user message: apply the chat template."),
    click.option("--system", help="With --chat: the system message; an empty one replaces the template's default."),
)
template_option = option_in(
    "Prompts", "--chat-template-kwargs", "variables", type=JSON_OBJECT,
    help="More variables of the chat template, such as '{\"enable_thinking\": false}'. One that the template does not use is "
    "refused.",
)  # fmt: skip
# A distribution's filters, which the benchmarks also have.
filter_options = options_of(SamplingParams, "filter", title="Sampling")
sampling_options = option_group(
    None, options_of(SamplingParams, "", "filter", title="Sampling"),
    options_of(StructuredOutputsParams, "", title="Structured output"),
)  # fmt: skip
# For what prints results that are complete, also as JSON.
detail_options = options_of(SamplingParams, "detail", title="Sampling")


def output_format_option(*formats: str) -> Callable:
    """Decorator: `--output-format` with these choices, of which the first is the default, and `--json`, the same as `-o json`.

    The command gets `output_format`.
    """
    return option_group(
        "Output",
        click.option("--json", "as_json", is_flag=True, is_eager=True, help="Print JSON: the same as -o json."),
        click.option(
            "--output-format", "-o", type=click.Choice(formats), default=formats[0], show_default=True, callback=_output_format,
            help="How to print the results.",
        ),
    )


def _output_format(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The value of --output-format, or "json" with --json, which is parsed before it."""
    if not context.params.pop("as_json", False):
        return value
    if value != "json" and context.get_parameter_source("output_format") is not ParameterSource.DEFAULT:
        raise click.UsageError(f"--json is --output-format json, and excludes --output-format {value}")
    return "json"


report_format_option = output_format_option("text", "md", "csv", "json", "jsonl")
text_format_option = output_format_option("text", "json")
output_file_option = option_in(
    "Output", "--output-file", type=click.Path(dir_okay=False, writable=True), metavar="FILE",
    help="Write the results to a file.", callback=lambda context, parameter, value: check_target(value, "--output-file"),
)  # fmt: skip
debug_option = option_in("General", "--debug", is_flag=True, help="Show the traceback of an error.")
quiet_option = option_in("General", "--quiet", "-q", is_flag=True, help="No progress and no summary.")
general_options = option_group(None, quiet_option, debug_option)


def require_chat(chat: bool, system: str | None, variables: dict[str, Any] | None) -> None:
    """Refuse `--system` and `--chat-template-kwargs` without `--chat`."""
    for name, value in (("--system", system), ("--chat-template-kwargs", variables)):
        if value is not None and not chat:
            raise click.UsageError(f"{name} needs --chat, which applies the chat template")


def sampling_params(options: dict[str, Any]) -> "SamplingParams":
    """`sampling_options` and `detail_options` as SamplingParams; InputError names the flag that is wrong."""
    values = given(SamplingParams, options) | {"structured_outputs": _structured_outputs(options)}
    if "logit_bias" in values:
        values["logit_bias"] = biases(values["logit_bias"])
    with named_by_option():
        return SamplingParams(**values)


def _structured_outputs(options: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of StructuredOutputsParams that the options set."""
    fields = {name: value for name, value in given(StructuredOutputsParams, options).items() if value is not False}
    for name in fields.keys() & {"json", "grammar"}:  # names of files
        if name == "grammar" or not fields[name].lstrip().startswith("{"):
            fields[name] = read_text(fields[name], _flag_of(name))
    kinds = [name for name in KINDS if name in fields]
    if fields and not kinds:
        flag = _flag_of(next(iter(fields)))
        raise click.UsageError(f"{flag} needs --json-schema, --json-object, --regex, --choice or --grammar")
    if len(kinds) > 1:
        raise click.UsageError("--json-schema, --json-object, --regex, --choice and --grammar exclude each other")
    return fields or None


def _flag_of(field: str) -> str:
    """The option that changes the field's default; of `structured_outputs` the one that was given."""
    if field == "structured_outputs":
        options = click.get_current_context().params
        field = next((kind for kind in KINDS if options.get(kind)), field)
    record = _SAMPLING.get(field)
    return (record and record.option_name) or f"--{field.replace('_', '-')}"


def _by_options(error: MinirtError) -> MinirtError:
    """An error of a sampling field as the command line says it: with options in place of the names of fields."""
    options = {
        "detokenize is False": "--no-detokenize is given", "detokenize=True": "no --no-detokenize",
        "json or json_object": "--json-schema or --json-object", **{name: _flag_of(name) for name in _SAMPLING if "_" in name},
    }  # fmt: skip

    def said(text: Any) -> Any:
        names = rf"(?<![\w-])(?:{'|'.join(options)})\b"
        return re.sub(names, lambda name: options[name[0]], text) if isinstance(text, str) else text

    field, comma, place = _field(error)
    what, flag = said(error.what.removeprefix(f"{field} ")), f"{_flag_of(field)}{comma}{place}"
    return error.changed(what=what, where=flag, expected=said(error.expected), hint=said(error.hint))


def _field(error: MinirtError) -> tuple[str, str, str]:
    """The sampling field that an error names, a comma, and the rest of its `where`."""
    return str(error.where).removeprefix("SamplingParams.").removeprefix("structured_outputs.").partition(", ")


@contextmanager
def named_by_option(place: str | None = None, keys: Collection[str] = ()) -> Iterator[None]:
    """Context of a request: an error of a value that an option has set names the option, any other error `place`.

    `keys`: the sampling fields that the request sets itself. If there are any, an error of an option names the place as well,
    since the two may contradict each other.
    """
    try:
        yield
    except MinirtError as error:
        parameters = click.get_current_context().command.params
        flags = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
        field = str(error.where).removeprefix("SamplingParams.").partition(", ")[0].partition(".")[0]
        named = error
        if not error.is_usage and field not in keys and _flag_of(_field(error)[0]) in flags:
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
    return EMBEDDED


def quantization(options: dict[str, Any]) -> str | None:
    """The format of `--quantize` or `--fp8`; None: neither is given."""
    if options.get("fp8") and options.get("quantization") not in (None, "fp8"):
        raise click.UsageError(f"--fp8 and --quantize {options['quantization']} exclude each other")
    return "fp8" if options.get("fp8") else options.get("quantization")


def to_load_options(options: dict[str, Any], name: str, **changes: Any) -> "LoadOptions":
    """LoadOptions for the model `name` from the parsed `model_options` or `load_options`. `changes` override them. Runs the files
    of `--import`.

    A "seed" among the options, such as that of `sampling_options`, is also the seed of random weights.
    """
    for file in options.get("imports", ()):  # not before: the command may have to prepare PyTorch and Triton
        import_file(file)
    return LoadOptions(**load_arguments(options, name, **changes))


def for_measuring(load: "LoadOptions") -> "LoadOptions":
    """Options with a full warm-up in place of a lazy one, which would go on between the steps that are measured. Refuses
    adapters, which no request that is measured names."""
    if load.loras and not load.merge_lora:
        raise click.UsageError(_NO_ADAPTER)
    return replace(load, warm_up="full") if load.warm_up == "lazy" else load


def load_arguments(options: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of `LoadOptions`, as `to_load_options` takes them from the parsed options. Imports no torch."""
    chosen = given(LoadOptions, options) | {"model": name, "quantization": quantization(options)}
    return chosen | {"impl": list(options.get("impl", ())) or "auto", "speculative": _speculative(options)} | changes


def _speculative(options: dict[str, Any]) -> "SpeculativeOptions | None":
    short, config = options.get("speculative"), options.get("speculative_config")
    if short is None and config is None:
        return None
    if None not in (short, config):
        raise click.UsageError("--speculate and --speculative-config exclude each other")
    from minirt.speculative.options import SpeculativeOptions

    return SpeculativeOptions.parse(str(short)) if config is None else SpeculativeOptions.from_config(config)


@contextmanager
def open_generator(options: "LoadOptions", quiet: bool) -> Iterator["Generator"]:
    """Load a model, with a progress bar on stderr unless `quiet`. The model is closed at the end."""
    with _load(options, quiet) as generator:
        yield generator


def _load(options: "LoadOptions", quiet: bool) -> "Generator":
    from minirt.generator import Generator

    with load_bars(not quiet) as progress:
        return Generator.from_pretrained(options, progress=progress)


@contextmanager
def open_model(options: dict[str, Any], quiet: bool, prompts: Sequence[str] = (), chat: bool = False) -> Iterator["Generator"]:
    """`open_generator` for the parsed `load_options`; without --model, the embedded model. Computes the --warm-prompt files.

    `prompts`, `chat`: what the model is for. It is not loaded if it has no tokenizer for this.
    """
    from minirt.head_start import head_start

    if options.get("loras") and not options.get("merge_lora") and "lora" not in options:
        raise click.UsageError(_NO_ADAPTER)
    if options.get("loras") and not options.get("merge_lora") and options["lora"] is None and not quiet:
        note("no --adapter: requests that name none use the model alone")
    warm = [(name, read_text(name, "--warm-prompt")) for name in options.get("warm_prompts") or ()]
    name = model_name(options, quiet)
    with head_start(load_arguments(options, name)):
        load = to_load_options(options, name)
        if load.random_weights:
            from minirt.loading.load import find

            if find(name, load.revision, need_weights=False).files is None:  # a preset without its files
                if chat:
                    hint = f"with --random-weights, {name} is not downloaded"
                    raise TokenizerError("the model has no tokenizer for a conversation", where=name, hint=hint)
                for text in (*prompts, *(text for _, text in warm)):
                    token_ids(name, text)
        generator = _load(load, quiet)
    with generator:
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
    return token_ids(generator.name, text) if generator.tokenizer is None else generator.encode(text, most)


def token_ids(model: str, text: str) -> list[int]:
    """"1 2 3" → [1, 2, 3], for a model without a tokenizer."""
    words = text.replace(",", " ").split()
    if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        what, expected = "the model has no tokenizer, so a prompt must be token ids", "integers, as in '1 2 3'"
        raise InputError(what, where=model, expected=expected, found=ascii(text[:80]))
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
    if cuda:
        if interpreting():
            raise ConfigError(str(interpreter_unsupported("auto", on_gpu=True)), where="TRITON_INTERPRET", hint="unset it")
        return
    if (reason := interpreter_unsupported(dtype or "auto", on_gpu=False)) is not None:
        raise UnsupportedError(reason, where=f"--dtype {dtype}", expected="float32 or float16 on a CPU")
    if not interpreting() and "triton" in sys.modules:
        raise MinirtError("Triton is already imported without its interpreter", hint="run with TRITON_INTERPRET=1 set")
    os.environ["TRITON_INTERPRET"] = "1"
