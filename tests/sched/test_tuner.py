"""The tuner: its budgets are kept, its choice is the fastest, its reasons name what it saw."""

import numpy as np
import pytest

from forge_jax.config import UserError
from forge_jax.sched.latency import Domain, Latency, Light, LogNormal, mixture
from forge_jax.sched.policies import Window
from forge_jax.sched.tuner import TuneConfig, redraw, tune, widths


def measured(latency: Latency):
    return mixture([Domain(name="a", share=1.0, compute=latency)], 3000, seed=0)


@pytest.mark.parametrize("updates", [2, 6, 12])
@pytest.mark.parametrize("latency", [Light(), LogNormal()])
def test_the_budgets_are_kept(updates: int, latency: Latency) -> None:
    cfg = TuneConfig(updates=updates, skew=0.4, horizon=60)
    tuned = tune(measured(latency), batch=8, train_seconds=0.5, cfg=cfg)
    bounds = Window(in_flight=tuned.in_flight, window=tuned.window).bounds(8, 0)
    assert bounds is not None
    assert bounds.updates <= updates
    assert tuned.predicted.updates_max <= updates
    assert abs(tuned.predicted.skew_duration) <= 0.4
    assert f"N={tuned.in_flight} W={tuned.window}" in " ".join(tuned.reasons)


def test_light_latencies_need_no_window_and_heavy_ones_get_one() -> None:
    cfg = TuneConfig(updates=12, skew=0.4, horizon=60)
    light = tune(measured(Light(spread=0.0)), batch=8, train_seconds=0.5, cfg=cfg)
    assert light.window == 0, "nothing is ever overtaken"
    heavy = tune(measured(LogNormal()), batch=8, train_seconds=0.5, cfg=cfg)
    assert heavy.in_flight + heavy.window > light.in_flight + light.window
    assert heavy.predicted.items_per_second <= 1.001 * light.predicted.items_per_second


def test_a_tighter_skew_budget_is_slower_or_refused() -> None:
    items = measured(LogNormal(sigma=1.3))
    loose, tight = (
        tune(items, batch=8, train_seconds=0.2, cfg=TuneConfig(updates=16, skew=skew, horizon=60))
        for skew in (1.0, 0.05)
    )
    assert tight.window < loose.window
    assert tight.predicted.items_per_second < loose.predicted.items_per_second
    assert any("past the skew budget 0.05" in reason for reason in tight.reasons)
    assert any("refused for its skew" in reason for reason in tight.reasons)


def test_the_places_of_the_fleet_are_a_limit_too() -> None:
    cfg = TuneConfig(updates=20, skew=0.9, most=24, horizon=60)
    assert tune(measured(LogNormal()), batch=8, train_seconds=0.01, cfg=cfg).in_flight <= 24


def test_windows_tried_fit_the_budget() -> None:
    for n in range(1, 50):
        for updates in range(7, 12):
            found = widths(n, 8, updates)
            assert found == sorted(set(found))
            assert found[0] == 0
            assert found[-1] == updates * 8 - n


def test_a_redraw_keeps_items_whole() -> None:
    items = measured(LogNormal())
    drawn = redraw(items, 500, seed=1)
    pairs = set(zip(items.compute, items.length, strict=True))
    assert set(zip(drawn.compute, drawn.length, strict=True)) <= pairs
    assert np.array_equal(drawn.compute, redraw(items, 500, seed=1).compute)
    with pytest.raises(UserError, match="nothing has been measured"):
        redraw(redraw(items, 0, seed=0), 5, seed=0)
    with pytest.raises(ValueError, match="updates=0"):
        TuneConfig(updates=0)
