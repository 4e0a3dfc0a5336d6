"""minirt's kernels in a model of transformers: patch, compare, unpatch.

python examples/patch_transformers.py             a tiny random model
python examples/patch_transformers.py FOLDER      a model that transformers loads

It needs transformers. On a GPU the Triton kernels run, on a CPU the PyTorch code that defines them.
"""

import sys
from importlib.util import find_spec

import minirt

if find_spec("transformers") is None:
    sys.exit("this example patches a model of transformers, which is missing: pip install transformers")

import torch
import transformers

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:
    config = transformers.Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=1000,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
model.to(device).eval()
prompt = torch.randint(3, model.config.vocab_size, (1, 20), device=device)


def logits() -> torch.Tensor:
    with torch.inference_mode():
        return model(prompt).logits.float()


before = logits()
table = minirt.patch(model)
print(table)
error = ((logits() - before).norm() / before.norm()).item()
print(f"relative error of the logits below 1e-2: {error < 1e-2}")

minirt.unpatch(model)
print(f"after unpatch the same bits: {torch.equal(logits(), before)}")
