"""What the modules of a run's checkpoints are worth on one text, whatever the policy says now.

A run's folder and a text go in; α of every module under the policy of the same checkpoint comes
out, as an update of that text would measure it (`mtp_accepted_k`, see `forge_jax.rl.mtp`). Where
the text stays, acceptance does not rise because what is said gets easier to guess.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.models import resolve
from forge_jax.config import TrainConfig
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.credit import continued, trainable, turn_sample
from forge_jax.rl.forward import Batch, StepConfig, occurrences, to_batch
from forge_jax.rl.report import METRICS, read_rows
from forge_jax.rl.start import placed, prepared, step_config
from forge_jax.rl.state import create
from forge_jax.rl.terms import share_of_modules
from forge_jax.sched.pack import micro_batches
from forge_jax.sched.pool import Pool
from forge_jax.sharding import make_mesh
from forge_jax.trees import Mean
from forge_jax.types import PackedTree


def text_of(cfg: TrainConfig, folder: Path, updates: int) -> list[PackedTree]:
    """All that was sampled for the last updates of a run, rewarded or not."""
    pool = Pool.open(str(folder / "pool"))
    items = [item for row in read_rows(folder / METRICS)[-updates:] for item in row["items"]]
    samples = [
        turn_sample(turn, 0.0)
        for item in items
        for episode in pool.get(item)
        for turn in continued(episode.turns)
        if trainable(turn)
    ]
    parts = micro_batches(samples, "tree", cfg.pack, carry=False)
    # A run with modules has no sequence that must be carried from block to block.
    return [part for part in parts if isinstance(part, PackedTree)]


def acceptance(
    cfg: TrainConfig, folder: Path, text: Sequence[PackedTree], since: int = 0
) -> list[dict[str, Any]]:
    """`step` and `fixed_acceptance_k` of every checkpoint in the folder from update `since` on.

    Raises UserError where a checkpoint cannot be read.
    """
    model = prepared(cfg, resolve(cfg.model, cfg.seed, mesh=make_mesh()))
    like = create(placed(cfg, model, make_mesh())[1], cfg.optim)
    step_cfg, found = step_config(cfg, model, warm=False), []
    batches = [to_batch(part, step_cfg) for part in text]
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        for step in checkpoints.steps():
            if step >= since:
                params = checkpoints.restore(step, like)[0].params
                each = [_accepted(params, batch, step_cfg) for batch in batches]
                totals = [sum(one[1:], one[0]) for one in zip(*each, strict=True)]
                alphas = {
                    f"fixed_acceptance_{k + 1}": float(mean.total / mean.count)
                    for k, mean in enumerate(totals)
                }
                found.append({"step": step} | alphas)
    return found


@partial(jax.jit, static_argnames=("cfg",))
def _accepted(params: Any, batch: Batch, cfg: StepConfig) -> list[Mean]:
    """α of every module over the edges of a micro-batch."""
    guess = occurrences(params, batch, cfg).guess
    assert guess is not None  # modules of a run have a weight
    measures = share_of_modules(guess, batch, jnp.ones(()), cfg)[1]
    return [measures[f"mtp_accepted_{k + 1}"] for k in range(len(guess.loss))]
