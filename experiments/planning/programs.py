"""The programs of one update, traced for a mesh that is not there.

A model, a mesh and a plan go in; what a trainer runs comes out, ready to be counted and
compiled: gradients of a row of micro-batches, their sum, the optimiser's step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.planning import abstract
from experiments.planning.config import PlanConfig, sequences
from experiments.planning.topology import Topology
from forge_jax.config import MeshConfig, UserError
from forge_jax.models.config import ModelConfig
from forge_jax.rl import parallel, step
from forge_jax.rl.forward import StepConfig

ATTENTION = "mosaic_tpu"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One jitted function with its arguments."""

    name: str
    traced: Any  # `jax.stages.Traced`
    runs: int  # in an update, or for a token
    beside: Mapping[str, float]  # bytes on a device that live through a run, arguments apart
    names: Mapping[str, str]  # what its arguments and its results are
    live: float = 1.0  # share of the tile pairs listed for its kernels that are visited
    taken: float = 1.0  # of conditionals, share that has work
    partitioned: bool = False  # the compiler cuts it over devices, and so knows its work


def train(
    model: ModelConfig, mesh: Mesh, sizes: MeshConfig, cfg: PlanConfig, topology: Topology
) -> list[Program]:
    """The programs of an update. Raises UserError where model, mesh and context do not suit."""
    rounds = math.ceil(sequences(cfg, topology) / sizes.places)
    params = abstract.weights(model, mesh, jnp.float32)
    step_cfg = step_config(model, cfg)
    state = abstract.state(params, mesh, step_cfg)
    step_cfg, batch, live = laid_out(mesh, sizes, cfg, step_cfg)
    one = abstract.everywhere(jax.ShapeDtypeStruct((), jnp.float32), mesh)

    gradients = parallel.gradients.trace(params, batch, one, step_cfg, mesh)
    weights, moments = (abstract.device_bytes(x) for x in (params, state.opt_state))
    programs = [
        Program(
            name="gradients",
            traced=gradients,
            runs=rounds,
            beside={"moments": moments, "gradients": weights if rounds > 1 else 0},
            names={"arguments": "weights", "results": "gradients"},
            live=live,
            taken=1 / sizes.expert,
        ),
        Program(
            name="apply",
            traced=step._apply.trace(state, params, step_cfg.optim, step_cfg.mtp.frozen),
            runs=1,
            beside={},
            names={"arguments": "weights, moments, gradients"},
        ),
    ]
    if rounds > 1:
        kept = {"weights": float(weights), "moments": float(moments)}
        programs.append(_add(gradients, params, mesh, rounds - 1, kept))
    return programs


def _add(
    gradients: Any, params: Any, mesh: Mesh, runs: int, beside: Mapping[str, float]
) -> Program:
    """The sum of two rows' gradients and metrics."""
    sums = params, abstract.everywhere(gradients.out_info[1], mesh)
    traced = step._add.trace(sums, sums)
    names = {"arguments": "gradients"}
    return Program(name="add", traced=traced, runs=runs, beside=beside, names=names)


def step_config(model: ModelConfig, cfg: PlanConfig) -> StepConfig:
    """What is compiled into the train step."""
    return StepConfig(
        model=model, attention=ATTENTION, remat=cfg.remembered, dtype=cfg.dtype,
        tile=cfg.tile or abstract.TILES[0],
    )  # fmt: skip


def laid_out(
    mesh: Mesh, sizes: MeshConfig, cfg: PlanConfig, step_cfg: StepConfig
) -> tuple[StepConfig, Any, float]:
    """With the smallest tile whose lists of pairs a core holds, unless the plan names one."""
    tiles: Sequence[int] = abstract.TILES if cfg.tile is None else (cfg.tile,)
    for tile in tiles:
        tiled = replace(step_cfg, tile=tile)
        batch, live = abstract.batch(cfg.context, mesh, sizes.places, tiled)
        listed = abstract.listed(batch)
        if listed <= abstract.LISTED:
            return tiled, batch, live
    raise UserError(
        f"context={cfg.context} on mesh.context={sizes.context}: {listed} pairs of tiles of "
        f"{tile} tokens are more than the {abstract.LISTED} that a core lists; raise mesh.context"
    )
