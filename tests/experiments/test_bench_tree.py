"""The benchmark of merging: what it counts, what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from refusals import refused

from experiments.bench.config import BenchConfig
from experiments.bench.flops import Work, update_flops, work
from experiments.bench.measure import MODES
from experiments.bench.peers import Peer, compared
from experiments.bench.plots import draw_context, draw_speedup
from experiments.bench.report import agree, make_row, peer_table, table
from experiments.bench_tree import file_of, legible, main, run
from experiments.models import preset
from experiments.workloads import SHAPES, write
from forge_jax.config import UserError, load
from forge_jax.models.config import ModelConfig
from forge_jax.sched.merge import merge
from forge_jax.types import Sample

SMALL = ModelConfig(
    vocab=11, embed=3, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=5,
    rope_theta=1e4, tied=False, max_context=64,
)  # fmt: skip


def sample(tokens: list[int], trained: int) -> Sample:
    """The last `trained` tokens are trained."""
    mask = np.arange(len(tokens)) >= len(tokens) - trained
    zero = np.zeros(len(tokens), np.float32)
    return Sample(tokens=np.array(tokens, np.int32), mask=mask, old_logp=zero, advantage=zero)


def test_flops_by_hand() -> None:
    samples = [sample([1, 2, 3], 1), sample([1, 2, 4, 5], 2)]
    tree, none = (work(merge(samples, mode)) for mode in ("tree", "none"))
    assert tree == Work(tokens=5, pairs=1 + 2 + 3 + 3 + 4, edges=3)
    assert none == Work(tokens=7, pairs=(1 + 2 + 3) + (1 + 2 + 3 + 4), edges=3)
    # q and o 3x24, k and v 3x12, three of 3x5, in each of two layers
    weights = 2 * (2 * 3 * 24 + 2 * 3 * 12 + 3 * 3 * 5)
    assert update_flops(SMALL, tree) == 6 * weights * 5 + 14 * 2 * 4 * 6 * 13 + 6 * 3 * 11 * 3


def answer(seconds: float, **other: Any) -> dict[str, Any]:
    return {
        "seconds": seconds, "cpu_seconds": 2 * seconds, "peak_rss_bytes": 100, "loss": -0.5,
        "grad_norm": 2.0, "tokens_computed": 8, "attention_area_executed": 64, **other,
    }  # fmt: skip


def row(**other: Any) -> dict[str, Any]:
    """Of the two samples above: a tree of 1 s, and a first update that counts for nothing."""
    works = {
        "none": Work(tokens=70, pairs=160, edges=30),
        "chain": Work(tokens=60, pairs=150, edges=30),
        "tree": Work(tokens=50, pairs=130, edges=30),
    }
    answers = {
        "tree": [answer(99.0), answer(0.9), answer(5.0), answer(1.0, peak_rss_bytes=110)],
        "chain": [answer(99.0), answer(1.5)],
        "none": [answer(99.0), answer(2.0)],
    }
    made = make_row("two", works, SMALL, answers, rate=1e6)
    return made | {"peers": {}, **other}


def test_a_row_holds_medians_without_the_first_update() -> None:
    found = row()
    assert found["seconds"] == {"tree": 1.0, "chain": 1.5, "none": 2.0}
    assert found["speedup_vs_none"] == 2.0
    assert found["speedup_vs_chain"] == 1.5
    flops = found["flops"]
    assert found["flop_ideal_ratio"] == flops["none"] / flops["tree"]
    assert found["percent_of_ideal"] == pytest.approx(200 / found["flop_ideal_ratio"])
    assert found["gemm_rate_share"] == flops["tree"] / 1e6
    assert found["gemm_rate_share_by_mode"]["none"] == flops["none"] / 2 / 1e6
    assert found["peak_rss_bytes"] == 110
    assert found["peak_rss_ratio"] == pytest.approx(1.1)


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_modes_that_disagree_are_not_compared(key: str) -> None:
    answers = {mode: [answer(1.0)] for mode in MODES}
    agree("two", answers)
    answers["chain"] = [answer(1.0) | {key: answer(1.0)[key] * (1 + 2e-5)}]
    with pytest.raises(RuntimeError, match=f"two: {key} is .* by chain"):
        agree("two", answers)


def printing(found: dict[str, Any] | str, status: int = 0) -> str:
    """A peer's command that prints this last."""
    line = found if isinstance(found, str) else json.dumps(found)
    return f"test -f {{workload}} && echo hello && echo '{line}' && exit {status}"


GOOD = {"seconds": 3.0, "loss": -0.5, "grad_norm": 2.0}


def ask(command: str, folder: Path) -> dict[str, Any]:
    (folder / "w w.npz").touch()
    peer = Peer(name="other", command=command)
    return peer.run(folder / "w w.npz", folder / "model", folder / "log")


def test_a_peer_is_compared_where_it_computes_the_same(tmp_path: Path) -> None:
    found = [ask(printing(GOOD | {"seconds": s, "more": "x"}), tmp_path) for s in (3.0, 9.0, 2.0)]
    peer = compared(found, answer(1.0), 1.5)
    assert peer["agrees"]
    assert peer["speedup"] == 2.0
    assert peer["printed"]["more"] == "x"


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_peer_that_disagrees_gets_no_ratio(key: str, tmp_path: Path) -> None:
    off = GOOD | {key: GOOD[key] * (1 + 2e-4)}
    peer = compared([ask(printing(off), tmp_path)], answer(1.0), 1.5)
    assert not peer["agrees"]
    assert "speedup" not in peer
    assert (peer[key], peer[f"our_{key}"]) == (off[key], GOOD[key])


REFUSED = {
    "fails": (printing(GOOD, status=3), r"peers.other=.* ended with 3: it said nothing"),
    "silent": ("true {workload}", "its last line is no JSON object: ''"),
    "text": (printing("done"), "its last line is no JSON object: 'done'"),
    "list": (printing("[1]"), r"its last line is no JSON object: '\[1\]'"),
    "missing": (printing({"seconds": 1.0, "loss": 2.0}), "grad_norm=None must be a number"),
    "text for a number": (printing(GOOD | {"loss": "low"}), "loss='low' must be a number"),
    "not finite": (printing('{"seconds": 1, "loss": NaN}'), "loss=nan must be finite"),
    "no time": (printing(GOOD | {"seconds": 0}), "seconds=0 must be > 0"),
}


@pytest.mark.parametrize(("command", "message"), REFUSED.values(), ids=REFUSED)
def test_a_peer_that_breaks_the_protocol_is_refused(
    command: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        ask(command, tmp_path)


MISTAKES: list[tuple[str, Any, str]] = [
    ("workloads", ["absent.npz"], "workloads: 'absent.npz' is neither a file nor one of micro"),
    ("workloads", [], "workloads=[] names none"),
    ("workloads", ["micro", "micro"], "workloads=['micro', 'micro'] has a name twice"),
    ("steps", 0, "steps=0 must be at least 1"),
    ("none_steps", 0, "none_steps=0"),
    ("contexts", [1], "contexts: 1 must be at least 2"),
    ("attention", "flash", "attention='flash'"),
    ("ratio_cap", 0.0, "ratio_cap=0.0"),
    ("peers", {"a/b": "x {workload}"}, "peers.a/b must be letters, digits, - and _"),
    ("peers", {"other": "x"}, "peers.other='x' must say where its {workload} goes"),
    ("speed", 3, "unknown key speed=3"),
]


@pytest.mark.parametrize(("key", "value", "message"), MISTAKES)
def test_a_mistake_names_key_and_value(key: str, value: Any, message: str) -> None:
    mapping = {"workloads": ["micro"], "model": "micro", key: value}
    with pytest.raises(UserError, match=re.escape(message)):
        load(BenchConfig, mapping)


def test_a_folder_that_holds_a_benchmark_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(UserError, match="holds a benchmark already"):
        run(BenchConfig(workloads=("micro",), model="micro"), tmp_path)


def test_a_file_is_a_workload(tmp_path: Path) -> None:
    write(tmp_path / "mine.npz", SHAPES["micro"], 64, 0)
    cfg = BenchConfig(workloads=("micro", str(tmp_path / "mine.npz")), model="micro")
    model, _ = preset("micro")
    assert file_of("mine", cfg.workloads[1], cfg, model, tmp_path) == tmp_path / "mine.npz"
    assert file_of("micro", "micro", cfg, model, tmp_path).stat().st_size > 0


def test_only_what_a_picture_can_show_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample([i, 2, 3, 4], 1) for i in range(9)]
    assert legible(samples) == samples
    monkeypatch.setattr("experiments.bench_tree.DRAWN", 14)
    assert legible(samples) == samples[:3]
    monkeypatch.setattr("experiments.bench_tree.DRAWN", 1)
    assert legible(samples) == samples[:1]


def test_tables_and_plots_are_drawn(tmp_path: Path) -> None:
    peers = {
        "same": compared([GOOD], answer(1.0), 1.5),
        "off": compared([GOOD | {"loss": 1.0}], answer(1.0), 1.5),
    }
    rows = [row(peers=peers), row(workload="more", tokens_total=700)]
    assert table(rows, "title").row_count == 6
    [verdicts] = [list(c.cells) for c in peer_table(rows).columns if c.header == "ratio"]
    assert verdicts[0] == "2.00x"
    assert verdicts[1].startswith("disagrees: loss 1, ours -0.5; gradient norm 2")
    draw_speedup(tmp_path / "speedup.png", rows)
    points = [{"context": n, "tokens": 64, "seconds": n, "gemm_seconds": 1} for n in (32, 64)]
    draw_context(tmp_path / "context.png", points)
    for name in ("speedup.png", "context.png"):
        assert matplotlib.image.imread(tmp_path / name).std() > 0.05


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench_tree", f"out={folder}", *overrides],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def test_the_command_refuses_a_mistake(tmp_path: Path) -> None:
    assert "model='huge'" in refused(main, f"out={tmp_path}", "workloads=micro", "model=huge")


# Another program: the same update in another process, mode and file of weights.
SAME = """python -m experiments.replay workload={workload} model={model} merge=none steps=1 |
python -c "
import json
found = json.loads(input())
print(json.dumps({**found, 'seconds': found['seconds_per_step']}))"
"""
CONTRACT = {
    "workload", "tokens_total", "tokens_unique", "flop_ideal_ratio", "speedup_vs_none",
    "speedup_vs_chain", "percent_of_ideal", "peak_rss_bytes", "gemm_rate_share",
}  # fmt: skip


@pytest.mark.slow
def test_a_whole_benchmark(tmp_path: Path) -> None:
    """Every mode, a peer that agrees and one that does not, by the command."""
    done = command(
        tmp_path, "workloads=micro", "model=micro", "steps=2", "contexts=[]",
        f"peers.same={SAME.replace('python', sys.executable)}",
        f"peers.off={printing(GOOD)}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    [micro] = found["rows"]
    assert set(micro) >= CONTRACT
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [micro]
    assert micro["percent_of_ideal"] == pytest.approx(
        100 * micro["speedup_vs_none"] / micro["flop_ideal_ratio"]
    )
    assert {mode: len(steps) for mode, steps in micro["steps"].items()} == {
        "tree": 2, "chain": 2, "none": 1,
    }  # fmt: skip
    assert 0 < micro["gemm_rate_share"] < 1
    assert micro["peers"]["same"]["agrees"]
    assert micro["peers"]["same"]["speedup"] > 0
    assert not micro["peers"]["off"]["agrees"]
    assert "disagrees" in done.stderr
    for name in ("speedup.png", "forest_micro.png"):
        assert matplotlib.image.imread(tmp_path / name).std() > 0.05
