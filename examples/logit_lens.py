"""The logit lens (nostalgebraist 2020): which token would come next if the model ended after each block?

python examples/logit_lens.py [MODEL]
"""

import sys

from minirt import Generator, LoadOptions, SamplingParams
from minirt.kernels import reference
from minirt.loading.load import load

TEXT = "Once upon a time, there was a little"

options = {"model": sys.argv[1]} if len(sys.argv) > 1 else {}
loaded = load(LoadOptions(capture=["layers.*"], **options))
model, head = loaded.model, loaded.model.layers[-1]
with Generator(model, loaded.tokenizer) as generator:
    params = SamplingParams(max_tokens=1, temperature=0, capture=["layers.*"])
    completion = generator.generate(TEXT, params)
    for place, states in completion.captured.items():
        normed = reference.rms_norm(states[-1:].to(model.device), head.norm.weight, model.config.rms_norm_eps)
        probabilities = reference.linear(normed, head.lm_head.weight).float().softmax(-1)[0]
        probability, token = probabilities.max(-1)
        print(f"{place:>9}: {loaded.tokenizer.decode([int(token)])!r} {probability:.2f}")
    print(f"   answer: {completion.text!r}")
