"""The requests of a run: lengths, prompts, bodies, the times at which they are sent, and which process sends them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

CHAT, COMPLETIONS = "chat/completions", "completions"
# Short common words, each of them one token of most vocabularies. Their number of tokens is what the server counts.
_COMMON = (
    "the of and to in is that it was for on are with they at this have from or had by but some what there we can out other "
    "were all your when up use how said an each she which do their time if will way about many then them would write like "
    "so these her long make thing see him two has look more day could go come did my no most who over know than call first "
    "people may down side been now find any new work part take get place made live where after back little only man year "
    "came show every good me give our under name very through just form great think say help low line before turn cause "
    "same mean move right old too does tell"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True)
class Workload:
    """What is asked of the server. The same values give the same requests, whatever the number of processes.

    Attributes:
        num_prompts: number of requests.
        input_range, output_range: tokens of a prompt and of its completion, drawn uniformly, both ends included.
        seed: of lengths, prompts and arrival times.
        text: prompts are text instead of token ids; `input_range` then counts words.
        vocab_size: token ids are below it.
        chat: requests are for /v1/chat/completions.
        fields: further fields of each body.
        part: number of the run, if there are several. Each has its own prompts, so that none finds those of another in a cache.
    """

    num_prompts: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    seed: int
    text: bool
    vocab_size: int
    chat: bool
    fields: dict[str, Any]
    part: int = 0

    def lengths(self) -> tuple[list[int], list[int]]:
        """Tokens of each prompt and of each completion: those of `minirt bench throughput` with the same options."""
        rng = random.Random(self.seed)
        inputs = [rng.randint(*self.input_range) for _ in range(self.num_prompts)]
        return inputs, [rng.randint(*self.output_range) for _ in range(self.num_prompts)]

    def body(self, index: int, input_len: int, output_len: int) -> bytes:
        """The body of a request, as JSON."""
        rng = random.Random(f"{self.seed}:{self.part}:{index}")
        prompt: Any = rng.choices(_WORDS if self.text else range(self.vocab_size), k=input_len)
        prompt = " ".join(prompt) if self.text else prompt
        if self.chat:
            asked = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
        else:
            asked = {"prompt": prompt, "max_tokens": output_len}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(asked | stream | self.fields).encode()


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process in seconds, from 0; all 0 if the rate is infinite.

    The times are scaled so that the last request arrives at count / rate, as in `vllm bench serve`: otherwise the mean rate would
    differ from the requested one by 1 / sqrt(count).
    """
    if rate == inf:
        return [0.0] * count
    rng, now, times = random.Random(f"arrivals:{seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    scale = count / rate / now
    return [time * scale for time in times]


def shares(max_concurrency: int | None, processes: int) -> list[int | None]:
    """The number of requests that each process may have in flight."""
    if max_concurrency is None:
        return [None] * processes
    return [max_concurrency // processes + (i < max_concurrency % processes) for i in range(processes)]


def assign(output_lens: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """The process that sends each request: the one with the fewest output tokens so far for its share of the concurrency.

    So all processes end at about the same time, without a queue between them.
    """
    loads, owners = [0.0] * len(limits), []
    for length in output_lens:
        owner = min(range(len(limits)), key=loads.__getitem__)
        loads[owner] += length / (limits[owner] or 1)
        owners.append(owner)
    return owners
