"""The configuration of a run of a few updates, in this process."""

from typing import Any

from forge_jax.config import (
    EvalConfig,
    PackConfig,
    RolloutConfig,
    SchedConfig,
    TrainConfig,
    WarmConfig,
)


def config(warm: int = 10, **sched: Any) -> TrainConfig:
    """Three updates after `warm` steps of imitation."""
    sizes = {"group": 5, "batch": 2, "in_flight": 4, "window": 2, "episode_seconds": 5.0}
    return TrainConfig(
        model="quick",
        task="hop",
        steps=3,
        warm=WarmConfig(steps=warm, batch=16, gate=0.0),
        rollout=RolloutConfig(slots=16, context=64, decode_steps=4, deterministic=True),
        sched=SchedConfig(**(sizes | sched)),
        pack=PackConfig(bucket_ratio=2.0),
        eval=EvalConfig(episodes=4, concurrency=4),
    )
