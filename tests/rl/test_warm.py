"""What the warm start imitates: the play of every level that the domains play."""

import numpy as np
import pytest

from forge_jax.agents.families import LEVELS, play_of
from forge_jax.config import CurriculumConfig, DomainConfig, TrainConfig, WarmConfig
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rl.mixture import imitated_play

CHAT = Chat(tokenizer=ByteTokenizer(), format=built_in("lookup"))


def sentences(step: int, batch: int = 5, **domains: tuple[int, ...]) -> list[int]:
    """How many sentences each text of qa has that a step imitates."""
    own = {
        name: DomainConfig(family="qa", share=1.0, curriculum=CurriculumConfig(levels=levels))
        for name, levels in domains.items()
    }
    cfg = TrainConfig(model="quick", task=None, steps=1, domains=own, warm=WarmConfig(batch=batch))
    samples = imitated_play(cfg, CHAT, step)
    texts = [CHAT.tokenizer.decode(s.tokens[~s.mask]) for s in samples]
    return [text.count(".") for text in texts]


@pytest.mark.parametrize("domains", [{"all": (0, 1, 2)}, {"easy": (0, 1), "hard": (1, 2)}])
def test_every_level_is_imitated_as_often_whatever_a_step_holds(
    domains: dict[str, tuple[int, ...]],
) -> None:
    told = [count for step in range(1, 4) for count in sentences(step, **domains)]
    assert [told.count(count) for count in (2, 6, 11)] == [5, 5, 5]
    assert len(set(sentences(1, **domains))) == 3, "and not a level a step"


def test_a_curriculum_of_one_level_is_that_level_alone() -> None:
    assert set(sentences(1, only=(1,))) == {6}


@pytest.mark.parametrize("family", sorted(LEVELS))
def test_scripts_play_the_level_that_they_are_asked_for(family: str) -> None:
    def played(level: int) -> list[object]:
        return [play_of(family, level=level)(np.random.default_rng(seed)) for seed in range(5)]

    assert (played(0) == played(LEVELS[family] - 1)) == (family == "hop_slow"), "waits alone differ"
