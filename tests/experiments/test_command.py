"""Files of settings and their dataclasses agree, and texts reach a command as they were typed."""

import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from experiments.bench.config import BenchConfig
from experiments.bench_attention import AttentionConfig
from experiments.bench_long import LongConfig
from experiments.clients import Config as ClientsConfig
from experiments.command import CONFIGS, _parts, _wrapped
from experiments.replay import ReplayConfig
from experiments.workloads import WorkloadConfig

CLASSES = {
    "bench_attention": AttentionConfig,
    "bench_long": LongConfig,
    "bench_tree": BenchConfig,
    "clients": ClientsConfig,
    "replay": ReplayConfig,
    "workloads": WorkloadConfig,
}
TEXTS = [
    "program --file {workload}",
    "a=b, [c] : 'd' \"e\" # f",
    r"\ \\ \" \\" + "\\",
    "${oc.env:HOME} $HOME \\${x}",
    "two\nlines",
    "null",
    "",
]


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose(name, overrides=list(overrides))


@pytest.mark.parametrize("name", CLASSES)
def test_every_setting_is_in_its_file(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    assert set(composed(name)) == fields


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_it_was_typed(text: str) -> None:
    override = _wrapped(f"peers.one={text}", (), ("peers",))
    found = OmegaConf.to_container(composed("bench_tree", override).peers, resolve=True)
    assert found == {"one": text}


def test_other_keys_are_left_to_hydra() -> None:
    assert _wrapped("peers=x", (), ("peers",)) == "peers=x"
    assert _wrapped("steps=3", ("model",), ("peers",)) == "steps=3"
    assert _wrapped("model=/a b", ("model",), ()) == "++plain.model=/a b"


def test_a_refined_choice_takes_its_file_and_keeps_the_rest() -> None:
    assert _parts("task=a:b+c", ("task",)) == ["task=a", '++plain.task="a:b+c"']
    assert _parts("task=a", ("task",)) == ["task=a"]
    assert _parts("pool=s3://x", ("task",)) == ["pool=s3://x"]
