"""Many prompts in one batch: reads JSON lines, and writes each result as soon as it is finished.

python examples/batch_jsonl.py FILE [MODEL]     a line of FILE: a text, or an object with "prompt" or "prompt_token_ids"

`minirt generate --prompts FILE --json` does the same with more checks; this shows how to build it.
"""

import json
import sys

from minirt import Generator, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python examples/batch_jsonl.py FILE [MODEL]; examples/prompts.jsonl is such a FILE")
prompts, params = [], []
with open(sys.argv[1], encoding="utf-8") as file:
    for line in file:
        request = json.loads(line)
        request = {"prompt": request} if isinstance(request, str) else request
        prompts.append(request.get("prompt") or request["prompt_token_ids"])
        sampling = {key: request[key] for key in ("max_tokens", "temperature", "seed") if key in request}
        params.append(SamplingParams(**{"max_tokens": 12, "temperature": 0} | sampling))

with Generator.from_pretrained(*sys.argv[2:3]) as generator:
    for index, completion in generator.completions(prompts, params):  # in the order of finishing
        record = {"index": index, "text": completion.text, "finish_reason": completion.finish_reason}
        print(json.dumps(record), flush=True)
