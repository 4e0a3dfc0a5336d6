"""A steering vector from two prompts: the difference of their hidden states, added to those of other requests.

python examples/steering.py [MODEL]
"""

import sys

from minirt import Generator, SamplingParams
from minirt.hooks.capture import Capture
from minirt.hooks.layer import add

PLACE, PROMPT = "layers.2", "Once upon a time, there was a little"

model = sys.argv[1:2]
last = SamplingParams(max_tokens=1, temperature=0, capture=Capture((PLACE,), rows="last", dtype="float32"))
with Generator.from_pretrained(*model, capture=[PLACE]) as generator:
    sad, glad = generator.generate(["The boy was sad. He began to cry", "The boy was happy. He began to laugh"], last)
    vector = glad.captured[PLACE][0] - sad.captured[PLACE][0]
with Generator.from_pretrained(*model, edits={PLACE: add(vector)}) as generator:
    factors = (0.0, 2.0, -2.0)
    params = [SamplingParams(max_tokens=24, temperature=0, steer={PLACE: factor}) for factor in factors]
    for factor, completion in zip(factors, generator.generate([PROMPT] * len(factors), params), strict=True):
        print(f"{factor:+.0f}:{completion.text}")
