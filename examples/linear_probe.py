"""A linear probe: do the hidden states know whether a story is about a girl or a boy?

python examples/linear_probe.py [MODEL]
"""

import sys

import torch

from minirt import Generator, SamplingParams
from minirt.hooks.capture import Capture

GIRLS = ("Lily", "Mia", "Sara", "Anna", "Emma", "Lucy", "Jane", "Bella")
BOYS = ("Tom", "Ben", "Max", "Sam", "Tim", "Jack", "Bob", "Danny")
STORIES = ["{} went to the park with a red ball. The sun was warm and", "One day, {} saw a big dog near the house. It was"]

prompts = [story.format(name) for story in STORIES for names in (GIRLS, BOYS) for name in names]
labels = torch.tensor([1.0 if name in GIRLS else -1.0 for _ in STORIES for names in (GIRLS, BOYS) for name in names])
held_out = torch.tensor([i % 4 == 3 for i in range(len(prompts))])
with Generator.from_pretrained(*sys.argv[1:2], capture=["embedding", "layers.*"]) as generator:
    last = Capture(("embedding", "layers.*"), rows="last", dtype="float32")  # of the prompt, since one token is drawn
    completions = generator.generate(prompts, SamplingParams(max_tokens=1, temperature=0, capture=last))
for place in completions[0].captured:
    states = torch.cat([completion.captured[place] for completion in completions])
    states = (states - states[~held_out].mean(0)) / states[~held_out].std()
    train, test = states[~held_out], states[held_out]
    ridge = train @ train.T + 10.0 * torch.eye(len(train))  # ridge regression, by its kernel
    predicted = test @ train.T @ torch.linalg.solve(ridge, labels[~held_out])
    right = (predicted.sign() == labels[held_out]).sum()
    print(f"{place:>9}: {right} of {len(test)} stories")
