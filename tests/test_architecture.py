"""Imports only point down the table of rooms, and the host-only rooms stay free of jax."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("forge_jax", "experiments", "tests")
MOST_LINES = 300
MAY_IMPORT = {
    "drawing": set(),
    "lineage": set(),
    "types": {"drawing", "lineage"},
    "loading": set(),
    "parts": {"loading"},
    "protection": {"loading"},
    "rolling": {"loading"},
    "scheduling": {"loading"},
    "domains": {"crediting", "loading"},
    "managing": {"loading"},
    "programs": {"loading"},
    "tool_servers": {"loading", "programs"},
    "stores": set(),
    "restarts": set(),
    "crediting": {"loading"},
    "objective": {"loading"},
    "config": {
        "crediting", "domains", "drawing", "loading", "managing", "objective", "parts",
        "protection", "rolling", "scheduling", "programs", "tool_servers",
    },
    "trees": set(),
    "sharding": {"config", "trees"},
    "collectives": set(),
    "attention": {"types", "config", "trees", "sharding"},
    "models": {"types", "config", "trees", "sharding", "collectives"},
    "rollout": {
        "types", "drawing", "config", "trees", "sharding", "collectives", "models", "attention",
        "stores",
    },
    "gateway": {"types", "drawing", "config", "restarts", "models.chat", "models.tokenizer"},
    "agents": {"types", "config", "managing", "programs", "restarts", "tool_servers"},
    "sched": {"types", "drawing", "config", "stores"},
    "rl": {
        "types", "drawing", "config", "trees", "sharding", "collectives", "attention", "models",
        "restarts", "rollout", "gateway", "agents", "sched",
    },
}  # fmt: skip
JAX_FREE = {
    "crediting", "domains", "drawing", "lineage", "types", "loading", "managing",
    "objective", "parts", "protection", "restarts",
    "rolling", "scheduling", "programs", "tool_servers", "config", "stores", "gateway", "agents",
    "sched",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted((ROOT / "forge_jax").rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT / "forge_jax").with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    allowed = MAY_IMPORT[here] | {here}
    for name in imports(path):
        if name.startswith("forge_jax."):
            inner = name.removeprefix("forge_jax.")
            assert any(inner == a or inner.startswith(a + ".") for a in allowed), (
                f"{path} imports {name}; {here} may import {sorted(allowed)}"
            )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_host_rooms_are_free_of_jax(path: Path) -> None:
    heavy = {"jax", "jaxlib", "flax", "optax", "orbax"}
    if room(path) in JAX_FREE or path.parent.name in ("router", "observe"):
        assert not {n for n in imports(path) if n.split(".")[0] in heavy}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_configuration_and_experiments_stay_outside(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"hydra", "omegaconf", "experiments", "torch", "transformers"}


def test_the_scheduler_has_no_clock_and_no_event_loop() -> None:
    for path in (ROOT / "forge_jax" / "sched").rglob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"asyncio", "threading", "time", "datetime"}, path


def test_no_file_has_more_than_300_lines() -> None:
    paths = [path for top in TOPS for path in (ROOT / top).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert len(lines) > 100
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


def test_modules_of_tests_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert sorted(set(names)) == sorted(names), "pytest imports one module of a name"
