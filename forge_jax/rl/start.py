"""Where a run begins: its newest checkpoint, or a policy warm-started on scripted play.

A model goes in; the state that RL starts or continues from comes out, on the run's mesh.
"""

import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.progress import Progress

from forge_jax.config import LossConfig, OptimConfig, TrainConfig, UserError
from forge_jax.models.layout import draw, layout
from forge_jax.models.load import LoadedModel
from forge_jax.models.lora import adapters_layout, tuned
from forge_jax.models.mtp import grown
from forge_jax.rl.balance import check_model
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.demonstrate import demonstrations, drawn
from forge_jax.rl.losses import LOSSES, negative_log_likelihood
from forge_jax.rl.measure import Totals
from forge_jax.rl.mixture import imitated_play
from forge_jax.rl.reference import remembered
from forge_jax.rl.state import TrainState, create
from forge_jax.rl.step import StepConfig, Updated
from forge_jax.rl.warm import warm_start
from forge_jax.sharding import mesh_from, put, shardings
from forge_jax.types import Sample

WARM_CHECKPOINT_EVERY = 100  # steps of the warm start
ADAPTERS = 0x6C6F  # folded into the seed of fresh adapters, apart from that of the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where RL begins or goes on."""

    step: int  # updates done
    state: TrainState
    base: Any  # what adapters are trained beside; None where the model is trained
    reference: Any  # parameters that the loss holds the policy near; None: it does not
    totals: Totals
    cursors: dict[str, Any] | None  # of the collector; None at a fresh start


def prepared(cfg: TrainConfig, model: LoadedModel) -> LoadedModel:
    """`model` with what the run adds to it. Raises UserError where it lacks what is trained."""
    check_model(cfg.moe, model.cfg)
    model = grown(model, cfg.mtp.depth, cfg.seed)
    if cfg.mtp.weight and not model.cfg.mtp:
        raise UserError(
            f"mtp.weight={cfg.mtp.weight}: {model.name} has no prediction modules; "
            "mtp.depth=1 adds one"
        )
    return model


def check_paths(cfg: TrainConfig) -> None:
    """Raises UserError where a sequence may be too long for a micro-batch, and what is asked for
    does not go with carrying it from block to block."""
    uncarried = []
    if cfg.mtp.weight:
        uncarried.append(f"mtp.weight={cfg.mtp.weight}")
    if cfg.mesh.context > 1:
        uncarried.append(f"mesh.context={cfg.mesh.context}")
    if uncarried and cfg.rollout.context > cfg.pack.budget * cfg.mesh.context:
        raise UserError(
            f"rollout.context={cfg.rollout.context}: a sequence may be beyond pack.budget="
            f"{cfg.pack.budget} x mesh.context={cfg.mesh.context}, and is not carried from block "
            f"to block with {' and '.join(uncarried)}; raise pack.budget or lower rollout.context"
        )


def beginning(
    cfg: TrainConfig, model: LoadedModel, folder: Path, checkpoints: Checkpoints, bars: Progress
) -> Start:
    """The newest checkpoint, or else the warm-started policy.

    Consumes the weights of `model`. Raises UserError if there are fewer devices than the mesh
    wants, sequences may be too long, or a checkpoint cannot be read or gone on from.
    """
    check_paths(cfg)
    base, params = placed(cfg, model, mesh_from(cfg.mesh))
    step = checkpoints.latest()
    if step is None:
        params = warm_params(cfg, model, params, base, folder, bars)
        state = create(params, cfg.optim)
        reference = reference_of(cfg, base, params, folder, fresh=True)
        return Start(
            step=0, state=state, base=base, reference=reference, totals=Totals(), cursors=None
        )
    late = cfg.sched.hold_updates
    if late and 0 < step < cfg.steps:
        raise UserError(
            f"sched.hold_updates={late}: checkpoint {step} lacks the older weights that its engine "
            "sampled from; such a run goes on from its start alone"
        )
    reference = reference_of(cfg, base, params, folder, fresh=False)
    state, host = checkpoints.restore(step, create(params, cfg.optim))
    return Start(
        step=step,
        state=state,
        base=base,
        reference=reference,
        totals=Totals(**host["totals"]),
        cursors=host["cursors"],
    )


def reference_of(cfg: TrainConfig, base: Any, params: Any, folder: Path, fresh: bool) -> Any:
    """What the loss holds the policy near: `params` as they were when the run in `folder` was
    `fresh`, beside `base`; None where it holds it near nothing of the kind."""
    if cfg.loss.reference is None:
        return None
    return tuned(base, remembered(params, folder, fresh))


def placed(cfg: TrainConfig, model: LoadedModel, mesh: Mesh) -> tuple[Any, Any]:
    """On `mesh` the frozen base, None without adapters, and what is trained, fresh."""
    params = put(model.params, shardings(layout(model.cfg), mesh))
    if not cfg.lora.rank:
        return None, params
    described = adapters_layout(model.cfg, cfg.lora)
    key = jax.random.fold_in(jax.random.key(cfg.seed), ADAPTERS)
    dtype = jnp.promote_types(params["embed"].dtype, jnp.float32)
    return params, put(draw(described, key, dtype), shardings(described, mesh))


def warm_params(
    cfg: TrainConfig, model: LoadedModel, params: Any, base: Any, folder: Path, bars: Progress
) -> Any:
    """`params`, beside `base`, after the supervised phase, which has checkpoints of its own."""
    state, first = create(params, cfg.warm.optim), 1
    with closing(Checkpoints(folder / "warm", keep=1)) as checkpoints:
        latest = checkpoints.latest()
        if latest is not None:
            state, _ = checkpoints.restore(latest, state)
            first = latest + 1
        bar = bars.add_task("warm start", total=cfg.warm.steps, completed=first - 1, shown="")

        def on_step(step: int, state: TrainState, done: Updated) -> None:
            bars.update(bar, completed=step, shown=f"loss {done.loss:.3f}")
            if step % WARM_CHECKPOINT_EVERY == 0 or step == cfg.warm.steps:
                checkpoints.save(step, state, {})

        if first <= cfg.warm.steps:
            state = warm_start(
                state,
                first=first,
                samples=imitation(cfg, model, bars),
                cfg=cfg,
                step_cfg=step_config(cfg, model, warm=True),
                on_step=on_step,
                base=base,
            )
    return state.params


def imitation(
    cfg: TrainConfig, model: LoadedModel, bars: Progress
) -> Callable[[int], list[Sample]]:
    """What each step of the warm start imitates: what the agent has played before a model that
    follows a script, or else the family's own play."""
    warm = cfg.warm
    if warm.demonstrations is None:
        return lambda step: imitated_play(cfg, model.chat, step)
    bar = bars.add_task("demonstrations", total=warm.demonstrations, shown="")
    shown = demonstrations(cfg, model, lambda: bars.advance(bar))
    return lambda step: drawn(shown, warm.batch, cfg.seed, step)


def by_updates(cfg: TrainConfig) -> OptimConfig:
    """The optimiser, which counts updates, with the schedule of its rate given in steps."""
    each = cfg.sched.updates * cfg.sched.epochs
    optim = cfg.optim
    return dataclasses.replace(
        optim, warmup_steps=optim.warmup_steps * each, decay_steps=optim.decay_steps * each
    )


def step_config(cfg: TrainConfig, model: LoadedModel, warm: bool) -> StepConfig:
    """What is compiled into the train step of a phase."""
    return StepConfig(
        model=model.cfg,
        optim=cfg.warm.optim if warm else by_updates(cfg),
        loss=negative_log_likelihood if warm else LOSSES[cfg.loss.kind],
        objective=LossConfig() if warm else cfg.loss,
        ratio_cap=cfg.ratio_cap,
        tile=cfg.pack.side,
        attention=cfg.attention,
        remat=cfg.remat,
        dtype=cfg.dtype,
        mtp=cfg.mtp,
        moe=cfg.moe,
        lora=cfg.lora,
    )
