"""Every program of configs/agent/ is a valid agent, and is chosen by its name."""

import json
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.command import CONFIGS
from experiments.eval import Config
from forge_jax.agents.black_box_text import facts_of, files_of
from forge_jax.config import ProgramConfig, TrainConfig, UserError
from forge_jax.loading import load
from forge_jax.programs import LimitConfig, SandboxConfig

NAMES = sorted(path.stem for path in (Path(CONFIGS) / "agent").glob("*.yaml"))
PROGRAMS = [name for name in NAMES if name != "base"]


def chosen(command: str, *overrides: str) -> dict[str, object]:
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        composed = compose(command, overrides=list(overrides))
    mapping = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_chosen_by_its_name(name: str) -> None:
    cfg = load(TrainConfig, chosen("train", f"agent={name}")).agent
    assert cfg is not None
    assert cfg == load(Config, chosen("eval", f"agent={name}") | {"task": ["hop"]}).agent
    facts = facts_of("http://h/v1", "k", 'a "model"', "a\nprompt", Path("/e"))
    for path, text in files_of(cfg, facts).items():
        if path.endswith(".json"):
            json.loads(text)
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".py"):
            compile(text, path, "exec")


def test_the_base_has_every_default_and_is_no_program() -> None:
    written = chosen("eval", "agent=base")["agent"]
    assert isinstance(written, dict)
    whole = load(ProgramConfig, {**written, "command": ["x", "{prompt}"]})
    assert whole == ProgramConfig(command=("x", "{prompt}"))
    assert set(written["limits"]) == set(vars(LimitConfig()))
    assert set(written["sandbox"]) == set(vars(SandboxConfig()))
    with pytest.raises(UserError, match="give one of them"):
        load(ProgramConfig, written)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_a_program_the_family_has_its_own_agent(command: str) -> None:
    assert "agent" not in chosen(command)
