"""Sample stories from SmolLM2-135M-Instruct with minirt: `python models/recipe/stories.py --model FOLDER --out DIR`.

Several processes share the GPU. Each works on `--batch` outlines and samples the next sentence of all of them in one batch.
Finished stories go to DIR/stories-RUN-PROCESS.jsonl.gz. A second run adds other stories, with its own number and its own seeds.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import outlines

REQUEST = "Write a simple story for small children. "
TEMPERATURE, TOP_P = 0.8, 0.9
SENTENCE_TOKENS = 32
CONTEXT = 768  # tokens of the request and the longest story
ENDS = ['."', '!"', '?"', "\n"]  # stop strings at the end of a sentence; outside a quotation also ". "
SEEDS_PER_PROCESS = 1 << 32


class Writer:
    """Writes a batch of outlines at a time with one generator."""

    def __init__(self, generator: Any, seed: int, batch: int) -> None:
        self.generator, self.batch, self.next_seed = generator, batch, seed
        self.rng = random.Random(seed)
        self.open: list[tuple[outlines.Outline, list[int]]] = []  # each with the tokens of its request
        self.tokens = self.prompt_tokens = self.tried = self.accepted = 0

    def round(self) -> list[outlines.Outline]:
        """Write one sentence for every open outline. Returns the finished stories."""
        from minirt import SamplingParams

        done, stems = [], []
        self.open += [self._fresh() for _ in range(self.batch - len(self.open))]
        for outline, request in self.open:
            stem = outline.advance()
            if stem is None:
                done.append(outline)
            else:
                stems.append((outline, request, stem))
        self.open = [(outline, request) for outline, request, _ in stems]
        prompts = [request + self.generator.encode(stem) for _, request, stem in stems]
        params = [
            SamplingParams(
                temperature=TEMPERATURE, top_p=TOP_P, seed=seed, max_tokens=SENTENCE_TOKENS,
                stop=ENDS if stem.count('"') % 2 else [*ENDS, ". "],
            ) for seed, (_, _, stem) in enumerate(stems, self.next_seed)
        ]  # fmt: skip
        self.next_seed += len(stems)
        completions = self.generator.generate(prompts, params) if prompts else []
        self.prompt_tokens += sum(map(len, prompts))
        for (outline, _, _), completion in zip(stems, completions, strict=True):
            self.tokens += len(completion.token_ids)
            text = self.generator.tokenizer.decode(completion.token_ids)  # with the stop string, unlike completion.text
            self.tried += 1
            self.accepted += outline.fill(text)
        return done

    def _fresh(self) -> tuple[outlines.Outline, list[int]]:
        outline = outlines.draw(self.rng)
        return outline, self.generator.encode_chat([{"role": "user", "content": REQUEST + outline.request}])


def work(options: argparse.Namespace, run: int, process: int) -> None:
    """Body of one process: write stories until the time is up."""
    import torch

    from minirt import Generator

    torch.set_num_threads(max((os.cpu_count() or 1) // options.processes, 1))
    path = options.out / f"stories-{run}-{process}.jsonl.gz"
    words = stories = 0
    with (
        Generator.from_pretrained(
            options.model, device=options.device, dtype="float32" if options.device == "cpu" else "bfloat16",
            max_model_len=CONTEXT, kv_cache_memory=options.kv_memory << 30, max_num_seqs=options.batch,
        ) as generator,
        gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as out,
    ):
        writer = Writer(generator, (run * options.processes + process) * SEEDS_PER_PROCESS, options.batch)
        finished = writer.round()
        print(f"process {process}: warm", flush=True)
        started = reported = time.perf_counter()
        writer.tokens = writer.prompt_tokens = 0
        while (now := time.perf_counter()) - started < options.minutes * 60:
            for outline in finished:
                record = {"plot": outline.plot, "text": outline.text, "written": outline.written}
                out.write(json.dumps(record) + "\n")
                words, stories = words + len(outline.text.split()), stories + 1
            if now - reported > 20:
                reported = now
                out.flush()
                _report(process, writer, stories, words, now - started)
            finished = writer.round()
        _report(process, writer, stories, words, time.perf_counter() - started)


def _report(process: int, writer: Writer, stories: int, words: int, seconds: float) -> None:
    print(
        f"process {process}: {seconds:.0f} s, {stories} stories of {words / max(stories, 1):.0f} words, "
        f"{writer.tokens / seconds:,.0f} tokens/s sampled, {writer.prompt_tokens / seconds:,.0f} tokens/s of prompts, "
        f"{writer.accepted / max(writer.tried, 1):.1%} of {writer.tried} sentences accepted", flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512, help="stories that a process writes at once")
    parser.add_argument("--kv-memory", type=int, default=8, help="GiB of KV cache for each process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = 1 + max((int(path.name.split("-")[1]) for path in options.out.glob("stories-*.jsonl.gz")), default=-1)
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(work, options, run), range(options.processes)))


if __name__ == "__main__":
    main()
