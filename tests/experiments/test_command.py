"""Files of settings and their dataclasses agree, and texts reach a command as they were typed."""

import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from experiments.bench.config import BenchConfig
from experiments.bench_attention import AttentionConfig
from experiments.bench_long import LongConfig
from experiments.clients import Config as ClientsConfig
from experiments.command import CONFIGS, _as_list, _parts, _unwrapped, _wrapped
from experiments.eval import Config as EvalConfig
from experiments.replay import ReplayConfig
from experiments.workloads import WorkloadConfig
from forge_jax.config import UserError, load

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


def test_a_plain_key_that_is_a_text_takes_any_path() -> None:
    override = _wrapped("model=runs/a=1,b=2/checkpoints/20", ("model",), ("model",))
    assert _unwrapped(composed("eval", override)).model == "runs/a=1,b=2/checkpoints/20"


def evaluation(*overrides: str) -> EvalConfig:
    parts = [_as_list(override, ("task",)) for override in overrides]
    cfg = _unwrapped(composed("eval", "++plain.model=quick", *parts))
    return load(EvalConfig, OmegaConf.to_container(cfg))  # type: ignore[arg-type]


def test_several_tasks_are_a_list_and_a_suite_names_them() -> None:
    assert evaluation("task=hop,reasoning:gcd+syllogism").task == ("hop", "reasoning:gcd+syllogism")
    assert evaluation("task=[hop,calc]").task == ("hop", "calc")
    assert evaluation("task=hop").task == ("hop",)
    assert {"hop", "calc", "qa"} < set(evaluation("suite=all").task)
    assert evaluation("suite=mixed").task == ("calc", "qa", "hop")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task=hop,hop", "each once"),
        ("samples=3", "samples=3 must be at least 1 and divide episodes=256"),
        ("samples=0", "samples=0"),
        ("level=-1", "level=-1"),
        ("plot=out.pdf", "plot='out.pdf' must be a .png file"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(override: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        evaluation("task=hop", override)


def test_a_refined_choice_takes_its_file_and_keeps_the_rest() -> None:
    assert _parts("task=a:b+c", ("task",)) == ["task=a", '++plain.task="a:b+c"']
    assert _parts("task=a", ("task",)) == ["task=a"]
    assert _parts("pool=s3://x", ("task",)) == ["pool=s3://x"]
