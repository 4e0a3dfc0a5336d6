"""`minirt compare`: compares each layer's implementation with its eager one, in errors and times.

minirt.bench.compare does the work.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minirt.cli import options as shared
from minirt.cli.files import check_picture, read_text
from minirt.cli.help import command
from minirt.cli.output import emit
from minirt.cli.report import progress_of, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.errors import NumericsError
from minirt.settings import setting

if TYPE_CHECKING:
    from minirt.generator import Generator

# Tokens by default, on a GPU and on a CPU: in the interpreter, one layer takes seconds.
_LENGTHS = {"prompt_len": (512, 32), "context_len": (128, 24), "num_tokens": (512, 64)}


def _length(name: str, text: str, spellings: str = "") -> Any:
    gpu, cpu = _LENGTHS[name]
    return setting(f"{text} Default: {gpu}; on a CPU {cpu}.", option=spellings or None, kind=COUNT)


class _Options:
    layer: str | None = setting("Compare only the layers that match: a name, or a glob such as 'layers.*.mlp'.", metavar="NAME")
    everything: bool = setting("Compare all layers, then the whole model. This is the default.", False, option="--all")
    prompt_len: int | None = _length("prompt_len", "Tokens of the prefill step.")
    batch_size: int = setting("Sequences of the decode step.", 1, option="--batch-size -b", kind=COUNT)
    context_len: int | None = _length("context_len", "Tokens of each sequence, including the new one.", "--context-len -c")
    text: str | None = setting("UTF-8 text to take tokens from; - is stdin. Default: a built-in text.", metavar="FILE")
    num_tokens: int | None = _length("num_tokens", "Tokens of the text that pass through the whole model.", "--num-tokens -n")
    picture: str | None = setting("Draw error and time of each layer: .png or .svg.", metavar="FILE", group="Output")


@command(short_help="Compare Triton with eager layers: errors and times.")
@shared.model_options
@shared.random_weights_option
@shared.kv_cache_dtype_option
@options_of(_Options, "", title="Measurement")
@shared.report_format_option
@shared.general_options
@click.pass_context
def compare(ctx: click.Context, layer: str | None, everything: bool, **options: Any) -> None:
    """Compare each layer's Triton implementation with its eager one: errors, times, and share of the limit.

    Both run on the same activations (those of the eager model on real tokens) and on copies of the same KV pages, in a prefill
    step and in a decode step. The truth is the eager implementation in fp64. A layer's error may be at most twice that of eager
    PyTorch in the same dtype, plus one rounding. If a layer exceeds this bound, nothing is timed and the exit code is 1.

    Then the whole model is compared: KL divergence and top-1 agreement over a text, and the time of a decode step with eager
    layers, with eager layers in a CUDA graph (the speedup is over this one), on Triton, and on Triton with one kind of layer
    eager.

    --impl selects what is compared with eager; by default Triton, wherever it can run. On a CPU the kernels run in Triton's
    interpreter: errors are valid, and nothing is timed. Default lengths are limited to the model's context. With
    --tensor-parallel, all ranks compare their shares together; figures are those of the first.
    """
    if layer is not None and everything:
        raise click.UsageError("--layer and --all exclude each other")
    if layer is not None and options["num_tokens"] is not None:
        raise click.UsageError("--num-tokens has no effect with --layer, which does not run the whole model")
    quiet, picture = options["quiet"], options["picture"]
    check_picture(picture)
    name = options["model"] = shared.model_name(options, quiet)
    text = None if options["text"] is None else read_text(options["text"], "--text")
    from minirt.device import pick_device

    device = pick_device(options["device"])
    cuda = device.type == "cuda"
    shared.set_up_triton(cuda, options["dtype"])
    from minirt.bench.ceiling import read_ceiling
    from minirt.bench.compare import compare as benchmark
    from minirt.bench.compare.report import NO_SPEED, draw, report
    from minirt.bench.report import context

    progress = progress_of(options)
    if not cuda:
        progress(f"{NO_SPEED}; one layer takes seconds.")
    ceiling = read_ceiling(device) if cuda else None
    # Each compared step has its own KV cache.
    load = shared.to_load_options(options, name, impl="eager", max_num_seqs=1, kv_cache_memory=256 << 20, warm_up="none")
    with shared.open_generator(load, quiet) as generator:
        model: Any = generator.model  # its layers are bound anew; the generator itself is not used from here on
        defaults = {option: on_gpu if cuda else on_cpu for option, (on_gpu, on_cpu) in _LENGTHS.items()}
        lengths = {option: options[option] or min(default, model.max_model_len) for option, default in defaults.items()}
        text_len = 0 if layer is not None else lengths["num_tokens"]
        shape = benchmark.Shape(lengths["prompt_len"], options["batch_size"], lengths["context_len"], text_len)
        tokens = _tokens(generator, text, max(shape.prompt_len, shape.context_len, text_len))
        result = benchmark.run(model, tokens, shape, impl=options["impl"], layer=layer, ceiling=ceiling, progress=progress)
        correctness = {"checked": True, "against": "the eager layers in fp64 on the same activations and pages"}
        about = context("compare", generator, name=name, command=words_of(ctx), correctness=correctness, ceiling=ceiling)
    printed = report(about, result, cuda)
    emit(printed.render(options["output_format"]), None, quiet)
    if picture is not None:
        draw(printed.context, printed.results, Path(picture))
    if result.faults:
        others = f" (and {len(result.faults) - 1} more)" if len(result.faults) > 1 else ""
        raise NumericsError(f"exceeds its error bound{others}: {result.faults[0]}", where="compare")


def _tokens(generator: "Generator", text: str | None, longest: int) -> list[int]:
    """Token ids of the text (default: a built-in text); `longest` random ids if the model has no tokenizer."""
    if text is None:
        if generator.tokenizer is None:
            rng = random.Random(0)
            return [rng.randrange(generator.config.vocab_size) for _ in range(longest)]
        from minirt.bench.compare.compare import DEFAULT_TEXT

        text = DEFAULT_TEXT.read_text(encoding="utf-8")
    shared.require_tokenizer(generator, "--text")
    return generator.encode(text)
