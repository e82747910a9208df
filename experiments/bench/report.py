"""What was measured, as rows of numbers and as a table.

Answers of the processes go in; a row of plain JSON comes out. Nothing is reported of modes that
do not compute the same thing.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

from experiments.bench.flops import Work, update_flops
from experiments.bench.peers import close
from forge_jax.models.config import ModelConfig

MODES = ("tree", "chain", "none")
IDEALS = {"none": "flop_ideal_ratio", "chain": "flop_ideal_ratio_chain"}
AGREEMENT = 1e-5  # relative, of loss and gradient norm between modes
Answers = Mapping[str, Sequence[Mapping[str, Any]]]  # of each mode, the first update before others


def agree(workload: str, answers: Answers) -> None:
    """Raises RuntimeError unless every mode's first update is the tree's."""
    wanted = answers["tree"][0]
    for mode in MODES:
        for key in ("loss", "grad_norm"):
            found = answers[mode][0][key]
            if not close(found, wanted[key], AGREEMENT):
                raise RuntimeError(
                    f"{workload}: {key} is {found!r} by {mode} and {wanted[key]!r} by tree; "
                    "modes that disagree are not compared"
                )


def make_row(
    workload: str, works: Mapping[str, Work], cfg: ModelConfig, answers: Answers, rate: float
) -> dict[str, Any]:
    """One workload's row: its sizes, its ideal, and what was reached.

    `rate` is the machine's, FLOPs a second. Seconds are medians without the first update.
    """

    def median(key: str) -> dict[str, float]:
        return {m: statistics.median(a[key] for a in answers[m][1:]) for m in MODES}

    flops = {mode: update_flops(cfg, done) for mode, done in works.items()}
    seconds = median("seconds")
    share = {mode: flops[mode] / seconds[mode] / rate for mode in MODES}
    peak = {mode: max(a["peak_rss_bytes"] for a in answers[mode]) for mode in MODES}
    ideal = {mode: flops[mode] / flops["tree"] for mode in MODES}
    speedup = {mode: seconds[mode] / seconds["tree"] for mode in MODES}
    return {
        "workload": workload,
        "tokens_total": works["none"].tokens,
        "tokens_unique": works["tree"].tokens,
        "flop_ideal_ratio": ideal["none"],
        "flop_ideal_ratio_chain": ideal["chain"],
        "speedup_vs_none": speedup["none"],
        "speedup_vs_chain": speedup["chain"],
        "percent_of_ideal": 100 * speedup["none"] / ideal["none"],
        "percent_of_ideal_chain": 100 * speedup["chain"] / ideal["chain"],
        "peak_rss_bytes": peak["tree"],
        "peak_rss_ratio": peak["tree"] / peak["none"],
        "peak_rss_bytes_by_mode": peak,
        "gemm_rate_share": share["tree"],
        "gemm_rate_share_by_mode": share,
        "gemm_flops_per_second": rate,
        "tokens": {mode: works[mode].tokens for mode in MODES},
        "tokens_computed": {mode: answers[mode][0]["tokens_computed"] for mode in MODES},
        "pairs_executed": {mode: answers[mode][0]["attention_area_executed"] for mode in MODES},
        "pairs": {mode: works[mode].pairs for mode in MODES},
        "loss_edges": {mode: works[mode].edges for mode in MODES},
        "flops": flops,
        "seconds": seconds,
        "cpu_seconds": median("cpu_seconds"),
        "steps": {mode: [a["seconds"] for a in answers[mode][1:]] for mode in MODES},
        "loss": answers["tree"][0]["loss"],
        "grad_norm": answers["tree"][0]["grad_norm"],
    }


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The rows for a reader: a line a mode, and how much faster than it the tree is."""
    made = Table(
        title=title, title_justify="left", box=HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0)
    )
    made.add_column("workload")
    made.add_column("mode")
    for heading in ("tokens", "seconds", "of GEMM", "peak GiB", "tree is", "ideal", "reached"):
        made.add_column(heading, justify="right")
    for row in rows:
        for mode in MODES:
            made.add_row(*_cells(row, mode), end_section=mode == MODES[-1])
    return made


def peer_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What the peers came to."""
    title = "peers: their seconds over the tree's"
    made = Table(
        title=title, title_justify="left", box=HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in ("workload", "peer", "seconds", "ratio"):
        made.add_column(heading)
    for row in rows:
        for name, peer in row["peers"].items():
            made.add_row(row["workload"], name, f"{peer['seconds']:.2f}", _verdict(peer))
    return made


def _cells(row: Mapping[str, Any], mode: str) -> list[str]:
    cells = [
        row["workload"] if mode == MODES[0] else "",
        mode,
        f"{row['tokens'][mode]:,}",
        f"{row['seconds'][mode]:.2f}",
        f"{100 * row['gemm_rate_share_by_mode'][mode]:.0f} %",
        f"{row['peak_rss_bytes_by_mode'][mode] / 2**30:.2f}",
    ]
    if mode == "tree":
        return [*cells, "", "", ""]
    speedup, ideal = row[f"speedup_vs_{mode}"], row[IDEALS[mode]]
    return [*cells, f"{speedup:.2f}x", f"{ideal:.2f}x", f"{100 * speedup / ideal:.0f} %"]


def _verdict(peer: Mapping[str, Any]) -> str:
    if peer["agrees"]:
        return f"{peer['speedup']:.2f}x"
    return (
        f"disagrees: loss {peer['loss']:.6g}, ours {peer['our_loss']:.6g}; "
        f"gradient norm {peer['grad_norm']:.6g}, ours {peer['our_grad_norm']:.6g}"
    )
