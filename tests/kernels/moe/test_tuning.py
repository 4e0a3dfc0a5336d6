"""The cases of `minirt tune` for experts: their buckets are those that launches ask for, and a wrong result is noticed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.weights import InBlocks

from minirt import models
from minirt.cli.tune import linear_shapes
from minirt.errors import NumericsError
from minirt.kernels.compile.tuning import LinearShape, override_config
from minirt.kernels.launch import gpu_of
from minirt.kernels.linear.product import ProductFacts
from minirt.kernels.moe import few_tokens, tuning
from minirt.kernels.moe.dispatch import mixture_residual
from minirt.kernels.reference import SharedExpert, computes_shared
from minirt.modeling.formats import Quantization
from minirt.modeling.model import Model

UP = LinearShape(12, 24, True, False, torch.float16, False, experts=(35, 2))
DOWN = LinearShape(24, 12, False, False, torch.float16, False, experts=(35, 2))


@pytest.mark.parametrize("stored", [{}, {"fp8": True}, {"fp8": True, "blocks": True}], ids=str)
def test_cases_of_few_tokens(stored, device, monkeypatch):
    shapes = [replace(shape, **stored) for shape in (UP, DOWN)]
    dense = LinearShape(24, 12, False, False, torch.float16, False)
    cases = list(tuning.few_tokens_cases([*shapes, dense], [1, 2048], device))
    assert len(cases) == 2
    for case, shape in zip(cases, shapes, strict=True):
        launch, check = case.prepare()
        launch(case.default)
        check(case.default)
        other = few_tokens.FewTokensConfig(2, 1, 32, 1, 2)
        check(other)
        with override_config(case.family, case.bucket, other):
            facts = ProductFacts(1, shape.N, shape.K, 1 if shape.fp8 else 2, shape.gated, blocks=shape.blocks, E=35, k=2)
            config = few_tokens.FAMILY.lookup(device, facts)
        assert config == other
    original = few_tokens.down
    monkeypatch.setattr(few_tokens, "down", lambda *a, **b: original(*a, **b).mul_(1.1))
    with pytest.raises(NumericsError):
        check(case.default)
    assert not list(tuning.few_tokens_cases(shapes, [few_tokens.MOST], device))


@pytest.mark.parametrize("shared", [12, 16])
def test_the_case_is_that_of_launches_with_a_shared_expert(shared, device, monkeypatch):
    """One of the experts' form counts as one more of those chosen, another one does not. Catches configurations that are stored
    where no launch looks for them."""
    preset = models.preset("Qwen3.5-35B-A3B").config
    moe = replace(preset.moe, num_experts=35, experts_per_token=2, intermediate_size=12, shared_intermediate_size=shared)
    config = replace(preset, num_layers=1, hidden_size=24, moe=moe)
    model = Model(config, models.build(config))
    model.dtype = torch.float16
    cases = list(tuning.few_tokens_cases(linear_shapes(model), [1], device))
    buckets, inner = [], few_tokens.FAMILY.bucket
    weights = [torch.zeros(35, 24, 24), torch.zeros(35, 24, 12), torch.zeros(2 * shared, 24), torch.zeros(24, shared)]
    gate_up, down, *one = (weight.to(device, torch.float16) for weight in weights)
    expert = SharedExpert(*one, torch.zeros(1, 24, dtype=torch.float16, device=device))
    x = torch.zeros(1, 24, dtype=torch.float16, device=device)

    def lookup(device, facts):
        buckets.append(inner(facts))
        return few_tokens.rule(facts, gpu_of(device))

    monkeypatch.setattr(few_tokens, "FAMILY", SimpleNamespace(lookup=lookup))
    joins = computes_shared(1, 2, gate_up, down, None, None, expert)
    logits = torch.zeros(1, 35, dtype=torch.float16, device=device)
    mixture_residual(x, logits, gate_up, down, x, 2, True, "silu", shared=expert if joins else None)
    assert joins == (shared == 12)
    assert [case.bucket for case in cases] == buckets
    for case in cases:
        _, check = case.prepare()
        check(case.default)


@pytest.mark.parametrize(("choice", "blocks"), [(Quantization("fp8", None), False), (InBlocks(), True)], ids=["rows", "blocks"])
def test_a_models_shapes_name_its_experts(choice, blocks):
    config = models.preset("Qwen3-30B-A3B").config
    model = Model(config, models.build(config), choice)
    model.dtype = torch.bfloat16
    shapes = [shape for shape in linear_shapes(model) if shape.experts is not None]
    assert shapes == [
        LinearShape(768, 2048, True, False, torch.bfloat16, True, experts=(128, 8), blocks=blocks),
        LinearShape(2048, 768, False, False, torch.bfloat16, True, experts=(128, 8), blocks=blocks),
    ]
