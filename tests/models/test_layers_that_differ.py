"""Layers that differ: the worked case of docs/adding-a-model.md, CWM, against transformers; refusals of SmolLM3."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.package import ROOT

from minirt import Generator, models
from minirt.errors import ConfigError, UnsupportedError

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
TOKENS = torch.randint(3, 211, (150,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def page():
    """What the page's code defines, without its examples on files."""
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for block in blocks:
        if "def cwm_layers" in block or "import WINDOW_OFF_BY_DEFAULT" in block:
            exec(block, names)
    return SimpleNamespace(**names)


@pytest.fixture
def cwm(page, monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "cwm", SimpleNamespace(config=page.cwm_config, layers=page.cwm_layers))


@pytest.mark.parametrize("options", [
    {"rope_parameters": LLAMA3, "sliding_window": 17},
    {"rope_parameters": PLAIN, "sliding_window": 64, "tie_word_embeddings": True, "mlp_bias": True,
     "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]},
], ids=["every fourth is full", "listed"])  # fmt: skip
@pytest.mark.usefixtures("cwm")
def test_against_transformers(options, hf_folder):
    """Catches a layer with the window of another one, and a window that is one token too long or too short."""
    folder = hf_folder("Cwm", seed=3, num_hidden_layers=5, head_dim=16, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS])).logits[0]
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        logits = generator.logits(TOKENS)
        windows = [layer.settings.window for layer in generator._model.layers if layer.kind == "attention"]
    assert (logits - truth).norm() / truth.norm() < 1e-5
    sliding = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert windows == [options["sliding_window"] if slides else None for slides in sliding]
    assert {*sliding} == {True, False}


@pytest.mark.usefixtures("cwm")
def test_refusals_of_the_page(hf_folder):
    """Catches a list that does not fit the layers, a kind that is ignored, and a rope that is not the one of transformers."""
    folder = hf_folder("Cwm", num_hidden_layers=5, head_dim=16, rope_parameters=PLAIN, sliding_window=9)
    raw = json.loads((folder / "config.json").read_text())
    for fields, words in (
        ({"layer_types": ["full_attention"]}, "layer_types: .*expected 5, one for each layer; found 1"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types: unknown kind.*found chunked_attention"),
        ({"sliding_window": 0}, "sliding_window: "),
    ):
        with pytest.raises(ConfigError, match=words):
            models.parse_config(raw | fields)
    with pytest.raises(ConfigError, match="rope_parameters: the field is missing"):
        models.parse_config({name: value for name, value in raw.items() if name != "rope_parameters"})


def test_refusals(hf_folder):
    """Catches a list that does not fit the layers, and the same file taken for a Llama."""
    raw = json.loads((hf_folder("SmolLM3", num_hidden_layers=5) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no_rope_layers: .*expected 5, one for each layer; found 2"):
        models.parse_config(raw | {"no_rope_layers": [1, 0]})
    with pytest.raises(ConfigError, match=r"no_rope_layers: .*expected 5, one for each layer; found 6"):
        models.parse_config(raw | {"no_rope_layers": [1] * 6})
    with pytest.raises(ConfigError, match=r"no_rope_layers: .*a list of integers from 0 to 1"):
        models.parse_config(raw | {"no_rope_layers": [1, 0, 2, 1, 1]})
    with pytest.raises(ConfigError, match=r"no_rope_layer_interval: "):
        models.parse_config(raw | {"no_rope_layers": None, "no_rope_layer_interval": 0})
    with pytest.raises(UnsupportedError, match=r"field no_rope_layer.*another position embedding"):
        models.parse_config(raw | {"model_type": "llama", "architectures": None})
