"""`minirt score`: how probable completions are after a prompt."""

from typing import TYPE_CHECKING, Any

import click

from minirt.cli import options as shared
from minirt.cli.files import read_text
from minirt.cli.help import command
from minirt.cli.output import finite, json_line, load_summary, logprobs_record, note, printable_lines, write

if TYPE_CHECKING:
    from minirt.outputs import Score


@command(short_help="Print how probable completions are after a prompt.")
@click.argument("prompt")
@click.argument("completions", nargs=-1, required=True, metavar="COMPLETION...")
@shared.load_options
@shared.chat_options
@shared.template_option
@shared.text_format_option
@shared.general_options
def score(
    prompt: str, completions: tuple[str, ...], chat: bool, system: str | None, variables: dict[str, Any] | None,
    output_format: str, quiet: bool, **options: Any,
) -> None:
    """Print the log-probability of each COMPLETION after PROMPT, and whether greedy decoding would have generated it.

    Nothing is generated. A PROMPT of "-" is stdin, verbatim. Prompt and completion are encoded together, and split after as many
    tokens as the prompt alone has; white space at the end of the prompt belongs to the completion. With --chat, PROMPT is a user
    message and COMPLETION the beginning of the answer, encoded separately. With --json, each completion is a line with a JSON
    object, which also has the log-probability of each token. A model without a tokenizer takes token ids ("1 2 3").
    """
    text = read_text("-") if prompt == "-" else prompt
    shared.require_chat(chat, system, variables)
    with shared.open_model(options, quiet, [text, *completions], chat) as generator:
        before = shared.encode_prompt(generator, text, chat, None, system, variables) if chat else text
        if generator.tokenizer is None:
            ids = [shared.token_ids(generator.name, completion) for completion in completions]
            scores = generator.score(shared.token_ids(generator.name, text), ids, progress=not quiet)
        else:
            answers = list(map(generator.tokenizer.encode_inside, completions)) if chat else list(completions)
            scores = generator.score(before, answers, progress=not quiet)
        if output_format == "json":
            pairs = zip(completions, scores, strict=True)
            write("".join(json_line(_record(text, completion, score)) for completion, score in pairs))
        else:
            write(_table(completions, scores))
        if not quiet:
            note(load_summary(generator))


def _record(prompt: str, completion: str, score: "Score") -> dict[str, Any]:
    record = {"prompt": prompt, "completion": completion, "logprob": finite(score.logprob), "is_greedy": score.is_greedy}
    record |= {name: getattr(score, name) for name in ("prompt_token_ids", "token_ids", "cached_tokens")}
    return record | {"logprobs": [logprobs_record(row) for row in score.logprobs]}


def _table(completions: tuple[str, ...], scores: "list[Score]") -> str:
    lines = [f"{'logprob':>12}  {'tokens':>6}  greedy  completion"]
    for completion, score in zip(completions, scores, strict=True):
        greedy = "yes" if score.is_greedy else "no"
        lines.append(f"{score.logprob:>12.4f}  {len(score.token_ids):>6}  {greedy:<6}  {completion!r}")
    return printable_lines("\n".join(lines)) + "\n"
