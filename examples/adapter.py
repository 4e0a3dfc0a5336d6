"""One model, and one request with a LoRA adapter beside one without: a story, and the same among pirates.

python examples/adapter.py

models/recipe/train_lora.py has trained the adapter for the embedded model.
"""

from pathlib import Path

from minirt import Generator, SamplingParams

PROMPT = "Once upon a time, there was a"
pirate = Path(__file__).with_name("pirate")  # a folder as PEFT writes it

with Generator.from_pretrained(loras={"pirate": pirate}) as generator:
    params = [SamplingParams(max_tokens=60, temperature=0, lora=name) for name in (None, "pirate")]
    for one, completion in zip(params, generator.generate([PROMPT] * 2, params), strict=True):
        print(f"{one.lora or 'no adapter'}:{completion.text}\n")
