"""The worked case of docs/adding-a-model.md: SmolLM3, whose every fourth layer has no rotary embedding, against transformers."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.package import ROOT

from minirt import Generator, models
from minirt.errors import ConfigError, UnsupportedError
from minirt.modeling.config import Fields
from minirt.models import smollm3 as smollm3_file

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
TOKENS = torch.randint(3, 211, (150,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def page():
    """What the page's code defines, without its examples on files."""
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for block in blocks:
        if "def smollm3_layers" in block or "import WINDOW_OFF_BY_DEFAULT" in block:
            exec(block, names)
    return SimpleNamespace(**names)


@pytest.fixture
def smollm3(page, monkeypatch):
    architecture = SimpleNamespace(config=page.smollm3_config, layers=page.smollm3_layers)
    monkeypatch.setitem(models.ARCHITECTURES, "smollm3", architecture)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_rope_layers": [0, 1, 0, 1, 1], "tie_word_embeddings": False, "attention_bias": True},
        {"no_rope_layer_interval": 2, "mlp_bias": True, "rope_parameters": LINEAR},
    ],
    ids=str,
)
@pytest.mark.usefixtures("smollm3")
def test_against_transformers(options, hf_folder):
    """Catches a layer with the rope of another one, and a layer "without" rope that still rotates."""
    folder = hf_folder("SmolLM3", seed=3, num_hidden_layers=5, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS])).logits[0]
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        found = generator.logits(TOKENS)
        without = [layer.settings.rope is None for layer in generator._model.layers if layer.kind == "attention"]
    assert (found - truth).norm() / truth.norm() < 1e-5
    assert without == [not flag for flag in model.config.no_rope_layers]
    assert True in without
    assert False in without


@pytest.mark.usefixtures("smollm3")
def test_refusals(hf_folder):
    """Catches a list that does not fit the layers, and the same file taken for a Llama."""
    raw = json.loads((hf_folder("SmolLM3", num_hidden_layers=5) / "config.json").read_text())
    for config in (models.parse_config, lambda fields: smollm3_file.config(Fields(fields))):  # the page's, and the project's
        with pytest.raises(ConfigError, match=r"no_rope_layers: .*expected 5, one for each layer; found 2"):
            config(raw | {"no_rope_layers": [1, 0]})
        with pytest.raises(ConfigError, match=r"no_rope_layers: .*expected 5, one for each layer; found 6"):
            config(raw | {"no_rope_layers": [1] * 6})
        with pytest.raises(ConfigError, match=r"no_rope_layers: .*a list of integers from 0 to 1"):
            config(raw | {"no_rope_layers": [1, 0, 2, 1, 1]})
        with pytest.raises(ConfigError, match=r"no_rope_layer_interval: "):
            config(raw | {"no_rope_layers": None, "no_rope_layer_interval": 0})
    with pytest.raises(UnsupportedError, match=r"field no_rope_layer.*another position embedding"):
        models.parse_config(raw | {"model_type": "llama", "architectures": None})
