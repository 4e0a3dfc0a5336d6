"""`minirt profile`. Catches a moment that counts twice or not at all, a kernel that goes to another layer, time that no part has,
and a step that is not the one that runs."""

import json

import pytest
from support.cli import printed, refused

from minirt import Generator, SamplingParams
from minirt.errors import ContextLengthError, InputError
from minirt.profiling.profile import DRAW, GAPS, INPUT, OTHER, Kernel, by_kind, divided, split, steps_of

LAYERS = [("a", "mlp", 10), ("b", "mlp", 20)]


def test_each_moment_counts_once():
    """Kernels that overlap, a gap within a step and one at its end, a kernel that nobody has launched, and equal names."""
    kernels = [
        Kernel("Memcpy DtoH", 0, 1),
        Kernel("gemm", 2, 6), Kernel("norm", 4, 5), Kernel("gemm", 5, 9), Kernel("unknown", 10, 12),
        Kernel("Memcpy DtoH", 12, 14), Kernel("gemm", 15, 17), Kernel("norm", 17, 18), Kernel("gemm", 18, 21),
        Kernel("Memcpy DtoH", 21, 27),
    ]  # fmt: skip
    steps = steps_of(kernels)
    assert [(begin, end) for _, begin, end in steps] == [(1, 14), (14, 27)]
    launched = [["gemm", "norm"], ["gemm"], ["Memcpy DtoH"]]
    parts = {part.name: part for part in divided([*LAYERS, (DRAW, DRAW, 0)], launched, steps)}
    microseconds = {name: round(part.seconds * 1e6, 6) for name, part in parts.items()}
    # "norm" of the first step ran while "gemm" did.
    assert microseconds == {"a": (4 + 0 + 2 + 1) / 2, "b": (3 + 3) / 2, DRAW: (2 + 6) / 2, OTHER: 2 / 2, GAPS: (1 + 1 + 1) / 2}
    assert sum(microseconds.values()) == 13
    assert [parts[name].launches for name in ("a", "b", DRAW)] == [2, 1, 1]
    assert parts["a"].kernels == pytest.approx({"gemm": 3e-6, "norm": 0.5e-6})
    kinds = {kind: (count, part) for kind, count, part in by_kind(parts.values())}
    assert (kinds["mlp"][0], kinds["mlp"][1].read_bytes) == (2, 30)


def test_marks_split_a_trace():
    names = ["early", "void spin_kernel", "x", "y", "spin_kernel", "spin_kernel", "z"]
    assert split(Kernel(name, i, i + 1) for i, name in enumerate(names)) == [["x", "y"], [], ["z"]]


@pytest.mark.parametrize("prompt", [False, True])
def test_the_parts_of_a_step_are_its_layers(prompt):
    with Generator.from_pretrained(capture=["layers.1"]) as generator:
        names = [layer.name for layer in generator._model.layers]
        greedy = SamplingParams(temperature=0.0, max_tokens=5)
        before = generator.generate([1, 2, 3], greedy).token_ids
        result = generator.profile(batch_size=3, context_len=70, prompt=prompt, repeats=2)
        assert generator.generate([1, 2, 3], greedy).token_ids == before
        with pytest.raises(InputError, match="not a step of this engine"):
            generator.profile(batch_size=65)
        with pytest.raises(InputError, match="too many tokens for one step"):  # a GPU would write behind its buffers
            generator.profile(batch_size=4, context_len=70, prompt=True)
        with pytest.raises((InputError, ContextLengthError)):
            generator.profile(context_len=10_000)
    assert [part.name for part in result.parts] == [INPUT, *names, DRAW]
    assert result.traced_s == pytest.approx(sum(part.seconds for part in result.parts))
    assert all(part.seconds > 0 for part in result.parts)
    assert ("prompts" in result.step) == prompt


def test_the_command(run):
    result = run("profile", "-c", "20", "-p", "9", "-b", "1,2", "--repeats", "1", "-o", "json", "-q")
    rows = json.loads(printed(result))["results"]
    assert len({row["step"] for row in rows}) == 4
    assert {row["kind"] for row in rows} >= {"attention", "mlp", "head"}
    text = printed(run("profile", "-c", "20", "-p", "0", "--repeats", "1", "-q"))
    assert "6 × mlp" in text
    assert "prompt" not in text
    beside = printed(run("profile", "-c", "20", "-p", "0", "--repeats", "1", "-q", "--compare", "eager"))
    assert "eager, µs" in beside
    assert "together" in beside
    refused(run("profile", "-b", "100", "-q"), "not a step of this engine")
