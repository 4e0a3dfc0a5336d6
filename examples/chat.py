"""A conversation: the answer is printed while it is generated, and every message is kept for the next turn.

python examples/chat.py [MODEL]     a folder, a Hub id or a preset with a chat template
"""

import sys

from minirt import Generator, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"
params = SamplingParams(max_tokens=24, temperature=0)
messages = []

with Generator.from_pretrained(model) as generator:
    for line in sys.stdin:  # one message per line; Ctrl-D ends the conversation
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        for piece in generator.stream(generator.encode_chat(messages), params):
            print(piece.text, end="", flush=True)
            answer += piece.text
        print()
        messages.append({"role": "assistant", "content": answer})
