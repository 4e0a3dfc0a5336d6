"""First tokens of the turns of a conversation: `python bench/tools/turns.py MODEL …`. Random weights; prints JSON.

The template leaves old reasoning out, as that of Qwen3.5: the next prompt goes on from the last one without its generation
prompt. Each turn adds a question and an answer. For a hybrid, compare with a model of attention layers whose steps take as long.
"""

import argparse
import statistics
from typing import Any

from minirt import Generator, SamplingParams
from minirt.bench.tools.results import print_record
from minirt.text.tokenizer import ChatTokens

TURNS, REPEATS = 20, 5
SYSTEM, QUESTION, ANSWER, GENERATION, REASONING = 1024, 100, 300, 5, 64  # tokens


def measure(model: str, **options: Any) -> list[dict[str, Any]]:
    """A row for each turn of REPEATS conversations: prompt tokens, cached tokens, medians of the first token and of steps."""
    params, serial = SamplingParams(max_tokens=REASONING, temperature=0.0, ignore_eos=True), 0
    turns: list[list[Any]] = [[] for _ in range(TURNS)]
    with Generator.from_pretrained(model, random_weights=True, warm_up="full", **options) as generator:

        def tokens(count: int) -> list[int]:
            nonlocal serial
            serial += 1
            return [3 + (serial * 7919 + t * 31) % (generator.config.vocab_size - 3) for t in range(count)]

        generation = tokens(GENERATION)
        for repeat in range(-1, REPEATS):
            history = tokens(SYSTEM)
            for runs in turns:
                history = history + tokens(QUESTION)
                prompt = ChatTokens(history + generation)
                prompt.history_len = len(history)
                done = generator.generate(prompt, params)
                if repeat >= 0:
                    runs.append((len(prompt), done.cached_tokens, done.time_to_first_token_s, 1 / done.decode_tokens_per_s))
                history = history + generation[:-1] + tokens(ANSWER)
    return [
        {
            "turn": turn, "prompt_tokens": runs[0][0], "cached_tokens": [cached for _, cached, *_ in runs],
            "first_token_s": statistics.median(first for *_, first, _ in runs),
            "step_s": statistics.median(step for *_, step in runs),
        }
        for turn, runs in enumerate(turns, 1)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--no-prefix-cache", action="store_true")
    options = parser.parse_args()
    results = {model: measure(model, prefix_cache=not options.no_prefix_cache) for model in options.models}
    print_record("turns", results=results)


if __name__ == "__main__":
    main()
