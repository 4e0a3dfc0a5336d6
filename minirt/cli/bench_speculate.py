"""`minirt bench speculate`: options and output. minirt.bench.speculate measures."""

from dataclasses import replace
from typing import Any

import click

from minirt.cli import options as shared
from minirt.cli.files import check_target, read_file, shown_name
from minirt.cli.help import command
from minirt.cli.report import print_report, progress_of, report_options, words_of
from minirt.cli.settings import COUNT, options_of
from minirt.settings import setting


class _Options:
    prompts: str = setting("Requests as of minirt generate --prompts; - is stdin.", metavar="FILE", group="Prompts")
    repeats: int = setting("Measured runs of each request.", 1, kind=COUNT)
    max_tokens: int = setting("New tokens of each, at most.", 128, kind=COUNT, group="Sampling")


@command(short_help="Time requests with drafts and without.")
@options_of(_Options, "", title="Measurement", prompts={"required": True})
@shared.chat_options
@shared.load_options
@shared.speculative_options
@report_options
@click.pass_context
def speculate(
    ctx: click.Context, prompts: str, repeats: int, max_tokens: int, chat: bool, system: str | None, **options: Any
) -> None:
    """Run requests with drafts and without, one after the other: how many drafts are right, what they bring, and whether the
    texts are the same.

    Without --speculate, drafts are n-grams. Decoding is greedy, and the seed is 0, unless a request says otherwise. The model is
    loaded twice, with drafts and then without, so only one copy is in memory at a time. "drafts s" and "plain s" are from the
    call to the last token.
    """
    shared.require_chat(chat, system, None)
    check_target(options["output_file"], "--output-file")
    from minirt.bench.report import Report, context
    from minirt.bench.speculate import rows, run
    from minirt.cli.request_file import read_prompt_lines
    from minirt.sampling_params import SamplingParams
    from minirt.speculative.options import SpeculativeOptions

    params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0)
    lines = read_prompt_lines(read_file(prompts, "--prompts"), shown_name(prompts), params)
    name = shared.model_name(options, options["quiet"])
    load = shared.for_measuring(shared.to_load_options(options, name, prefix_cache=False))  # repeats would measure the cache
    load = load if load.speculative else replace(load, speculative=SpeculativeOptions())
    progress, quiet = progress_of(options), options["quiet"]
    with shared.open_generator(load, quiet) as generator:
        requests = [
            (f"line {line.line}" if line.id is None else str(line.id), line.encode(generator, chat, system), line.params)
            for line in lines
        ]
        drafts = run(generator, requests, repeats, progress)
        unchecked = {"checked": False, "why": "texts are compared with those without drafts, nothing with the eager layers"}
        about = context("speculate", generator, name=name, command=words_of(ctx), correctness=unchecked, ceiling=None)
        about["speculative"] = vars(generator.speculative)
    with shared.open_generator(replace(load, speculative=None), quiet) as generator:
        plain = run(generator, requests, repeats, progress)
    print_report(Report(about, rows(requests, drafts, plain)), options)
