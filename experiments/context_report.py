"""What `experiments.contexts` found, as tables and as a picture.

Rows of play and of drift flow in, a run each; means over the runs of what they were trained under
flow out, with 95 % bootstrap intervals of the mean.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.compare import cell, markdown, plain
from experiments.comparing import Estimate, estimate

Row = Mapping[str, Any]
WHOLE = "full"  # the scaffold that leaves the context as it is


def names(rows: Sequence[Row], key: str) -> list[Any]:
    """The values that a key has, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def success(rows: Sequence[Row], trained: str, scaffold: str, level: int) -> Estimate | None:
    """Share of solved episodes under a scaffold at a level, over runs trained in one way."""
    return estimate([r["success"] for r in matching(rows, trained, scaffold, level)])


def matching(rows: Sequence[Row], trained: str, scaffold: str, level: int) -> list[Row]:
    """The rows of these, one a run."""
    wanted = (trained, scaffold, level)
    return [r for r in rows if (r["trained"], r["scaffold"], r["level"]) == wanted]


def falls(rows: Sequence[Row], trained: str, used: str, level: int) -> Estimate | None:
    """Success under the scaffold that a run was trained under minus that under `used`."""
    own = {
        r["run"]: r["success"]
        for r in rows
        if (r["trained"], r["scaffold"], r["level"]) == (trained, r["own"], level)
    }
    there = matching(rows, trained, used, level)
    return estimate([own[r["run"]] - r["success"] for r in there if r["run"] in own])


def by_lookups(
    rows: Sequence[Row], trained: str, scaffold: str
) -> tuple[list[int], list[Estimate | None]]:
    """Numbers of lookups of all levels, and success at each, over runs."""
    own = [r for level in names(rows, "level") for r in matching(rows, trained, scaffold, level)]
    lengths = sorted({int(n) for row in own for n in row["by_lookups"]})
    shares = [
        [
            solved / n
            for row in own
            for solved, n in [row["by_lookups"].get(str(length), (0, 0))]
            if n
        ]
        for length in lengths
    ]
    return lengths, [estimate(one) for one in shares]


def reduction(drifts: Sequence[Row], of: str, against: str, level: int) -> float | None:
    """By how many percent the mean divergence of one kind of runs is below that of another."""
    mean = {
        kind: estimate([d["kl"] for d in drifts if (d["trained"], d["level"]) == (kind, level)])
        for kind in (of, against)
    }
    here, there = mean[of], mean[against]
    if here is None or there is None or there.mean == 0:
        return None
    return 100 * (1 - here.mean / there.mean)


def tables(rows: Sequence[Row], drifts: Sequence[Row]) -> str:
    """Markdown: success under every scaffold, what is lost against the own one, success by
    lookups, and the divergence."""
    kinds, scaffolds, lines = names(rows, "trained"), names(rows, "scaffold"), []
    for level in names(rows, "level"):
        body = [[k, *(told(success(rows, k, s, level)) for s in scaffolds)] for k in kinds]
        lines += [f"Success at level {level}:", ""]
        lines += [*markdown(["trained under", *scaffolds], body), ""]
        body = [[k, *(told(falls(rows, k, s, level)) for s in scaffolds)] for k in kinds]
        lines += [f"Fall from the own scaffold at level {level}:", ""]
        lines += [*markdown(["trained under", *scaffolds], body), ""]
    for scaffold in scaffolds:
        found = {k: by_lookups(rows, k, scaffold) for k in kinds}
        lengths = next(iter(found.values()))[0]
        body = [[k, *map(told, values)] for k, (_, values) in found.items()]
        lines += [f"Success under {scaffold} by lookups:", ""]
        lines += [*markdown(["trained under", *map(str, lengths)], body), ""]
    body = [[d["trained"], str(d["seed"]), str(d["level"]), f"{d['kl']:.4f}",
             f"[{d['kl_ci'][0]:.4f}, {d['kl_ci'][1]:.4f}]", f"{d['moved']:.4f}", str(d["tokens"])]
            for d in drifts]  # fmt: skip
    heads = ["trained under", "seed", "level", "KL, nats a token", "interval", "moved", "tokens"]
    lines += markdown(heads, body)
    pairs = [(of, against) for of in kinds for against in kinds if of != against]
    for level in names(drifts, "level"):
        for of, against in pairs:
            less = reduction(drifts, of, against, level)
            if less is not None:
                lines.append(f"level {level}: KL of {of} against that of {against}: {-less:+.0f} %")
    return "\n".join(lines)


def told(found: Estimate | None) -> str:
    """A cell of a table: the mean and its interval."""
    return cell(None if found is None else plain(found))


def draw(path: Path, rows: Sequence[Row], drifts: Sequence[Row], managed: str) -> None:
    """Success by lookups with whole and with managed contexts, by scaffold, and the divergence."""
    figure = Figure(figsize=(19, 4.4), layout="constrained")
    whole, short, bars, kl = figure.subplots(1, 4, width_ratios=[1, 1, 1.4, 0.7])
    kinds, scaffolds = names(rows, "trained"), names(rows, "scaffold")
    for axes, scaffold in ((whole, WHOLE), (short, managed)):
        for kind in kinds:
            lengths, found = by_lookups(rows, kind, scaffold)
            points(axes, lengths, found, kind, "-o")
        axes.set(title=f"success under {scaffold}", xlabel="lookups", ylim=(-0.02, 1.03))
    first = min(names(rows, "level"))
    for i, kind in enumerate(kinds):
        places = [s + 0.16 * (i - (len(kinds) - 1) / 2) for s in range(len(scaffolds))]
        points(bars, places, [success(rows, kind, s, first) for s in scaffolds], kind, "o")
    bars.set(title=f"success at level {first} by scaffold", ylim=(-0.02, 1.03))
    bars.set_xticks(range(len(scaffolds)), scaffolds, rotation=30)
    for level in names(drifts, "level"):
        found = [
            estimate([d["kl"] for d in drifts if (d["trained"], d["level"]) == (kind, level)])
            for kind in kinds
        ]
        points(kl, list(range(len(kinds))), found, f"level {level}", "o")
    kl.set_xticks(range(len(kinds)), kinds, rotation=30)
    kl.set(title=f"KL({managed} || {WHOLE}), nats a token")
    kl.set_ylim(bottom=0)
    for axes in (whole, short, bars, kl):
        axes.grid(alpha=0.25)
    bars.legend(title="trained under", fontsize=8)
    kl.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def points(
    axes: Any, places: Sequence[float], found: Sequence[Estimate | None], label: str, form: str
) -> None:
    """Means with their intervals."""
    there = [(x, e) for x, e in zip(places, found, strict=True) if e is not None]
    means = [e.mean for _, e in there]
    low = [max(0.0, e.mean - e.low) for _, e in there]
    high = [max(0.0, e.high - e.mean) for _, e in there]
    axes.errorbar([x for x, _ in there], means, yerr=[low, high], fmt=form, capsize=3, label=label)
