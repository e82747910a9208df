"""The loader is strict, impossible values are refused by name, and every key has an effect."""

import ast
import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import (
    EvalConfig,
    MeshConfig,
    OptimConfig,
    PackConfig,
    RolloutConfig,
    SchedConfig,
    TrainConfig,
    UserError,
    WarmConfig,
    load,
)

ROOT = Path(__file__).parent.parent
RUN = {"model": "quick", "task": "hop", "steps": 3}
MIXED = {"task": None, "domains": {"hop": {}, "qa": {"share": 2}}}


def test_mappings_become_frozen_records() -> None:
    cfg = load(TrainConfig, {**RUN, "sched": {"window": None}, "optim": {"learning_rate": 1}})
    assert cfg.sched.window is None
    assert cfg.optim == OptimConfig(learning_rate=1.0)
    assert isinstance(cfg.optim.learning_rate, float)
    assert hash(cfg) == hash(load(TrainConfig, dataclasses.asdict(cfg)))


def test_shares_of_domains_are_parts_of_the_whole() -> None:
    cfg = load(TrainConfig, RUN | MIXED)
    assert [(d.name, d.family, d.share) for d in cfg.mixture] == [
        ("hop", "hop", 1 / 3),
        ("qa", "qa", 2 / 3),
    ]
    assert [(d.name, d.share) for d in load(TrainConfig, RUN).mixture] == [("hop", 1.0)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"unknown": 1}, "unknown key unknown=1"),
        ({"sched": {"unknown": 1}}, "unknown key sched.unknown=1"),
        ({"steps": "many"}, "steps='many' must be int"),
        ({"steps": True}, "steps=True must be int"),
        ({"steps": None}, "steps=None must be int"),
        ({"resume": 3}, "resume=3 must be str"),
        ({"sched": {"window": 1.5}}, "sched: window=1.5 must be an integer >= 0, a share of in_fl"),
        ({"sched": {"window": -1}}, "window=-1 must be an integer >= 0"),
        ({"sched": {"window": "wide"}}, "window='wide' must be"),
        ({"sched": {"window": True}}, "sched.window=True must be one of int, float, str"),
        ({"sched": {"policy": "lifo"}}, "policy='lifo' must be one of window, fifo"),
        ({"sched": {"policy": "fifo", "window": 3}}, "window=3 goes with policy=window"),
        ({"sched": {"policy": "greedy", "window": None}}, "window=None goes with policy=window"),
        ({"sched": {"policy": "greedy_drop"}}, "policy=greedy_drop needs drop_updates"),
        ({"sched": {"drop_updates": 2}}, "drop_updates=2 goes with policy=greedy_drop"),
        ({"sched": {"policy": "stream", "versions": 2}}, "versions=2 goes with policy=versions"),
        ({"sched": {"policy": "stream", "buffer": 0}}, "buffer=0 must be >= 1"),
        ({"sched": {"policy": "fifo", "lag_updates": 3}}, "lag_updates=3 goes with policy=window"),
        (
            {"sched": {"policy": "stream", "buffer": 1, "in_flight": 8, "synchronous": True}},
            "policy=stream goes with synchronous=False",
        ),
        ({"sched": {"group_seconds": 9}}, "group_seconds=9.0 and group_least=None go together"),
        ({"sched": {"group_seconds": 60, "group_least": 2}}, "group_seconds=60.0 must be"),
        ({"sched": {"group_seconds": 9, "group_least": 8}}, "group_least=8 must be at least 2"),
        ({"sched": {"tune": {}}}, "missing key sched.tune.lag_updates"),
        ({"sched": {"tune": {"lag_updates": 1}}}, "tune.lag_updates=1 is too few for in_flight=16"),
        (
            {"sched": {"tune": {"lag_updates": 3}, "lag_updates": 3}},
            "lag_updates=3 goes without tune",
        ),
        (
            {"sched": {"tune": {"lag_updates": 3}, "policy": "greedy"}},
            "tune.lag_updates=3 goes with policy=window",
        ),
        ({"sched": {"lag_updates": 1}}, "lag_updates=1 is too few for in_flight=16 and batch=8"),
        ({"sched": {"head_seconds": 0.0}}, "head_seconds=0.0 must be a number > 0"),
        ({"sched": {"requeue": True}}, "requeue=True needs head_seconds or group_seconds"),
        ({"task": None}, "task=None and domains=None: give one of them"),
        ({"domains": {"qa": {}}}, "task=hop and domains=['qa']: give one of them"),
        ({**MIXED, "domains": {}}, "domains={} must name at least one"),
        ({**MIXED, "domains": {"Q A": {}}}, "domains.Q A: a name has letters"),
        ({**MIXED, "domains": {"expired": {}}}, "domains.expired: a name has letters"),
        ({**MIXED, "domains": {"update": {}}}, "domains.update: a name has letters"),
        ({**MIXED, "domains": {"broken": {}}}, "domains.broken: a name has letters"),
        ({"loss": {"kind": "tis", "kl": 0.1}}, "loss.kl=0.1 is of the trainer before the batch"),
        (
            {"reward": {"families": [{"family": "qa", "process": 0.1}]}},
            "reward.families: qa is none of the run's",
        ),
        (
            {"agent": {"command": ["program", "{prompt}"]}, "sched": {"tool_seconds": 1}},
            "sched.tool_seconds=1.0 is of tools of a white-box agent",
        ),
        ({**MIXED, "domains": {"qa": {"share": 0}}}, "domains.qa: share=0.0 must be a number > 0"),
        ({**MIXED, "domains": {"qa": {"speed": 2}}}, "unknown key domains.qa.speed=2"),
        (
            {**MIXED, "domains": {"qa": {"curriculum": {"levels": [0, 1], "demote": 0.5}}}},
            "domains.qa.curriculum: demote=0.5 needs promote",
        ),
        (
            {**MIXED, "domains": {"qa": {"curriculum": {"levels": [1], "promote": 0.5}}}},
            "promote=0.5 leads nowhere with levels=(1,)",
        ),
        (
            {"stages": [{"shares": {"hop": 1}}]},
            "stages of the shares [{'hop': 1}] go with domains: there are none",
        ),
        ({**MIXED, "domains": ["hop"]}, "domains=['hop'] must be a mapping of keys to values"),
        ({**MIXED, "domains": {"hop": 1}}, "domains.hop=1 must be a mapping of keys to values"),
        ({"stages": "all"}, "stages='all' must be a list"),
        ({"loss": {"per": "constant"}}, "loss: per=constant needs constant"),
        ({"protect": {"most_broken": 0}}, "protect: most_broken=0 must be at least 1"),
        ({**MIXED, "stages": []}, "stages: until=[] must grow, and be null of the last"),
        (
            {**MIXED, "stages": [{"shares": {"hop": 1}, "until": 2}]},
            "stages: until=[2] must grow, and be null of the last stage alone",
        ),
        ({**MIXED, "stages": [{"shares": {"hop": 1}}] * 2}, "stages: until=[None, None] must grow"),
        (
            {**MIXED, "stages": [{"shares": {"hop": 1, "desk": 2}}]},
            "stages: shares of ['desk', 'hop'] must be those of the domains ['hop', 'qa']",
        ),
        ({**MIXED, "stages": [{"shares": {"qa": "x"}}]}, "shares.qa='x' must be a number > 0"),
        (
            {**MIXED, "stages": [{"shares": {"hop": 1, "qa": 2}}], "sched": {"shares": "tokens"}},
            "stages go with sched.shares=items",
        ),
        ({"eval": {"every": 0}}, "eval: every=0 must be at least 1"),
        (
            {"eval": {"every": 2}, "sched": {"synchronous": True, "hold_updates": 1}},
            "eval.every=2 would measure the older weights of sched.hold_updates=1",
        ),
        ({"sched": {"shares": "seconds"}}, "shares='seconds' must be one of items, tokens"),
        ({"sched": {"shares": "tokens"}}, "sched.shares=tokens goes with domains: task=hop is al"),
        (
            {**MIXED, "sched": {"shares": "tokens", "lag_updates": 3}},
            "lag_updates=3 goes without shares=tokens",
        ),
        ({"filter": {"constant": True}}, "filter: constant=True and tries=None go together"),
        ({"filter": {"solved": 0.9}}, "filter.solved=0.9 needs tasks=N of a domain"),
        ({**MIXED, "warm": {"demonstrations": 4}}, "warm.demonstrations=4 goes with task"),
        ({"warm": {"optim": {"learning_rate": 0}}}, "warm.optim: learning_rate=0.0 must be > 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(TrainConfig, RUN | extra)


def test_a_divergence_from_the_trainer_counts_once_there_are_updates_between() -> None:
    loss = {"loss": {"kind": "tis", "kl": 0.1}}
    for more in ({"sched": {"updates": 2}}, {"sched": {"epochs": 2}}, {"loss": {"kl": 0.1}}):
        load(TrainConfig, RUN | loss | more)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UserError, match="missing key task"):
        load(TrainConfig, {"model": "quick", "steps": 3})


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (RolloutConfig, {"slots": 0}),
        (SchedConfig, {"group": 1}),
        (SchedConfig, {"in_flight": 7}),
        (SchedConfig, {"synchronous": True, "in_flight": 9}),
        (SchedConfig, {"hold_updates": 1}),
        (SchedConfig, {"synchronous": True, "hold_updates": -1}),
        (OptimConfig, {"beta2": 1.0}),
        (OptimConfig, {"eps": 0.0}),
        (WarmConfig, {"batch": 0}),
        (WarmConfig, {"gate": 1.0}),
        (PackConfig, {"budget": 0}),
        (PackConfig, {"tile": 0}),
        (PackConfig, {"bucket_ratio": 1.0}),
        (EvalConfig, {"concurrency": 0}),
        (EvalConfig, {"episodes": 0}),
        (MeshConfig, {"fsdp": 0}),
    ],
    ids=str,
)
def test_an_impossible_value_is_named(cls: type, values: dict[str, Any]) -> None:
    name, value = list(values.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value}"):
        cls(**values)


def keys(cls: type) -> set[str]:
    """Names of the fields of a configuration and of those inside it."""
    found = set()
    for name, hint in typing.get_type_hints(cls).items():
        found |= {name} | (keys(hint) if dataclasses.is_dataclass(hint) else set())
    return found


def test_every_key_is_read_somewhere() -> None:
    read = {
        node.attr
        for folder in ("forge_jax", "experiments")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("config.py", "crediting.py", "parts.py", "scheduling.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert keys(TrainConfig) - read == set()
