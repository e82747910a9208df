"""Pictures are drawn from any run, however short; leaves are rows in depth-first order."""

from pathlib import Path

import numpy as np

from forge_jax.rl.plots import domain_panels, draw_curves, draw_forest, leaf_rows
from forge_jax.sched.merge import merge
from forge_jax.types import Sample


def sample(*tokens: int) -> Sample:
    mask = np.arange(len(tokens)) == len(tokens) - 1
    zero = np.zeros(len(tokens), np.float32)
    return Sample(
        tokens=np.array(tokens, np.int32), mask=mask, old_logp=zero, advantage=zero + mask
    )


def test_every_token_stands_beside_its_leaves() -> None:
    tree = merge([sample(1, 2, 3), sample(1, 2, 4), sample(1, 5), sample(9, 9)])
    top, bottom = leaf_rows(tree)
    leaves = bottom - top
    assert tree.tokens[: tree.n_tokens].tolist() == [1, 2, 3, 4, 5, 9, 9]
    assert leaves.tolist() == [3, 2, 1, 1, 1, 1, 1]
    assert top.tolist() == [0, 0, 0, 1, 2, 3, 3]


def test_domains_have_panels_of_their_own() -> None:
    row = {"share_items_qa": 0.5, "share_items_hop": 0.5, "reward_hop": 1.0, "reward": 1.0}
    panels = dict(domain_panels(row))
    assert panels["reward of domains"] == ("reward_hop", "reward_qa")
    assert not dict(domain_panels({"reward": 1.0}))["reward of domains"]


def test_pictures_are_written(tmp_path: Path) -> None:
    draw_forest(tmp_path / "forest.png", merge([sample(1, 2, 3), sample(1, 7)]), chr)
    draw_curves(tmp_path / "none.png", [], {})
    rows = [{"step": 1, "reward": None, "entropy": 0.2}, {"step": 2, "reward": 0.5}]
    draw_curves(tmp_path / "curves.png", rows, {"eval_before": 0.4, "eval_after": None})
    drafted = {"step": 1, "acceptance_1": 0.5, "tokens_per_verify": 1.5}
    draw_curves(tmp_path / "drafts.png", [drafted], {})
    for name in ("forest.png", "none.png", "curves.png", "drafts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
