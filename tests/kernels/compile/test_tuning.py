"""Stored tuned configurations. Catches: use of a configuration of an older source or of another kernel, a damaged file that stops
a model from running, a file that is half written."""

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from minirt.errors import InputError, MinirtError
from minirt.kernels.compile import tuning
from minirt.kernels.launch import Gpu, gpu_of


@dataclass(frozen=True)
class Config:
    block: int
    warps: int = 4
    tma: bool = False
    registers: int | None = None


class Facts(NamedTuple):
    T: int
    N: int
    wide: bool = False


def rule(facts, gpu):
    return Config(facts.N, warps=gpu.sms)


@pytest.fixture
def family(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text("first")
    return tuning.Family("mine", Config, (str(source),), ("T", "N"), rule)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "deep" / "tuned.json"


def test_what_is_stored_is_found(family, file):
    assert tuning.load(family, file) == {}
    tuning.store(family, file, {"a": Config(64), "b": Config(128, 8, True, 96)})
    tuning.store(family, file, {"b": Config(32)})
    assert tuning.load(family, file) == {"a": Config(64), "b": Config(32)}
    assert [f.name for f in file.parent.iterdir()] == [file.name], "a temporary file was left"


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_what_is_tried_comes_first_and_goes_again(family):
    """Lookups are cached, and their caches follow. Catches a configuration that stays after it was tried."""
    facts, other = Facts(16, 8), Facts(16, 9)
    chosen = rule(facts, gpu_of(CPU))
    assert family.lookup(CPU, facts) == chosen

    def fails():
        with tuning.override_config(family, "T=16 N=8", Config(64)):
            assert (family.lookup(CPU, facts), family.lookup(CPU, other)) == (Config(64), rule(other, gpu_of(CPU)))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert family.lookup(CPU, facts) == chosen


def test_what_is_stored_later_is_found(family, file, monkeypatch):
    """A cached lookup must not keep its earlier answer."""
    monkeypatch.setattr(tuning, "path", lambda device: file)
    monkeypatch.setattr(tuning, "gpu_of", lambda device: Gpu(90, 132))
    assert family.lookup(GPU, Facts(16, 8)) == Config(8, warps=132)
    tuning.store(family, file, {"T=16 N=8": Config(64)})
    assert family.lookup(GPU, Facts(16, 8)) == Config(64)
    assert family.lookup(GPU, Facts(16, 9)) == Config(9, warps=132)


def test_a_bucket_is_named_by_its_facts_only(family):
    """Stored results must stay valid: the names and their order are part of the file. Facts that name nothing are left out."""
    assert family.bucket(Facts(16, 8, wide=True)) == family.bucket(Facts(16, 8)) == "T=16 N=8"


def test_a_configuration_that_does_not_fit_is_not_used(family):
    """The bucket has one, but it is for outputs that are not wide. `minirt tune` then has no case."""
    usable = replace(family, usable=lambda config, facts: not facts.wide, candidates=lambda facts, gpu: [Config(1), Config(2)])
    with tuning.override_config(usable, "T=16 N=8", Config(64)):
        assert usable.lookup(CPU, Facts(16, 8)) == Config(64)
        assert usable.lookup(CPU, Facts(16, 8, wide=True)) == rule(Facts(16, 8), gpu_of(CPU))
    case = usable.case(Facts(16, 8), CPU, lambda: None)
    assert (case.bucket, case.tokens, case.default, case.candidates) == (
        "T=16 N=8", 16, rule(Facts(16, 8), gpu_of(CPU)), (Config(1), Config(2)),
    )  # fmt: skip
    assert usable.case(Facts(16, 8, wide=True), CPU, lambda: None) is None
    assert family.case(Facts(16, 8), CPU, lambda: None) is None  # it is not tuned


def test_kernels_do_not_mix(family, file):
    other = replace(family, name="other")
    tuning.store(family, file, {"a": Config(64)})
    tuning.store(other, file, {"a": Config(16)})
    assert tuning.load(family, file) == {"a": Config(64)}
    assert tuning.load(other, file) == {"a": Config(16)}


def test_another_source_makes_it_stale(family, file, tmp_path):
    tuning.store(family, file, {"a": Config(64)})
    tuning.source_hash.cache_clear()
    (tmp_path / "kernel.py").write_text("second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.load(family, file) == {}
    tuning.store(family, file, {"b": Config(32)})
    assert tuning.load(family, file) == {"b": Config(32)}, "a configuration of the older source came back"


WRONG_TYPE = '{"block": [1], "warps": 4, "tma": false, "registers": null}'


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": 99, "kernels": {}}', '{"kernels": {}}', '{"schema": 1, "kernels": {"mine": 3}}',
     '{"schema": 1, "kernels": {"mine": {"source": "HASH", "configs": {"a": {"block": 64}}}}}',
     '{"schema": 1, "kernels": {"mine": {"source": "HASH", "configs": {"a": ' + WRONG_TYPE + "}}}}",
     '{"schema": 1, "kernels": {"mine": {"source": "HASH", "configs": [1]}}}'],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_a_warning(family, file, text):
    file.parent.mkdir()
    file.write_text(text.replace("HASH", tuning.source_hash(family.sources)))
    with pytest.warns(RuntimeWarning, match="no usable tuned configurations.*minirt tune"):
        assert tuning.load(family, file) == {}


def test_storing_replaces_a_damaged_file(family, file):
    file.parent.mkdir()
    file.write_text("{")
    with pytest.warns(RuntimeWarning):
        tuning.store(family, file, {"a": Config(64)})
    assert json.loads(file.read_text())["schema"] == tuning.SCHEMA
    assert tuning.load(family, file) == {"a": Config(64)}


def test_who_stores_at_once_loses_nothing(family, file):
    """Other users can read the file, too."""
    names = [str(i) for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: tuning.store(family, file, {name: Config(64)}), names))
    assert set(tuning.load(family, file)) == set(names)
    umask = os.umask(0o022)
    try:
        tuning.store(family, file, {})
    finally:
        os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o644


def test_nothing_is_written_through_a_link(family, file, tmp_path):
    """Others may have put links into a shared folder, under the names that are written there."""
    file.parent.mkdir()
    theirs = {name: tmp_path / name for name in ("stored", "temporary", "older")}
    for target in theirs.values():
        target.write_text("theirs")
    file.symlink_to(theirs["stored"])
    file.with_suffix(".tmp").symlink_to(theirs["temporary"])
    file.with_name(f"{file.name}.tmp").symlink_to(theirs["older"])
    with pytest.warns(RuntimeWarning, match="no usable tuned configurations"):
        tuning.store(family, file, {"a": Config(64)})
    assert {target.read_text() for target in theirs.values()} == {"theirs"}
    assert not file.is_symlink()
    assert tuning.load(family, file) == {"a": Config(64)}


def test_a_folder_that_cannot_be_written(family, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(MinirtError, match="cannot store tuned configurations"):
        tuning.store(family, tmp_path / "taken" / "tuned.json", {"a": Config(64)})


def test_a_name_is_registered_once(family, monkeypatch):
    monkeypatch.setattr(tuning, "_REGISTERED", {})

    def cases(shapes, device):
        yield from ()

    tuning.register(family, cases)
    assert tuning.registered() == {"mine": (family, cases)}
    with pytest.raises(InputError, match="taken"):
        tuning.register(replace(family), cases)


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIRT_CACHE", str(tmp_path))
    assert tuning.cache_folder() == tmp_path
    monkeypatch.delenv("MINIRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_folder() == tmp_path / "minirt"
