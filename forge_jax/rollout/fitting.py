"""Whether an engine of some sizes can serve a model, and on a mesh: asked before it allocates."""

import dataclasses

from forge_jax.config import RolloutConfig, UserError
from forge_jax.models.config import ModelConfig


def check_model(rollout: RolloutConfig, cfg: ModelConfig) -> None:
    """Raises UserError where an engine of these sizes cannot serve such a model."""
    if rollout.context > cfg.max_context:
        raise UserError(
            f"rollout.context={rollout.context} is beyond the model's max_context={cfg.max_context}"
        )
    if rollout.routes and not cfg.experts:
        raise UserError("rollout.routes=True: the model has no experts to record")
    if rollout.modules > cfg.mtp:
        raise UserError(
            f"rollout.drafts={rollout.drafts} with rollout.speculate=mtp: the model has "
            f"{cfg.mtp} prediction modules"
        )


def over_places(rollout: RolloutConfig, there: int) -> RolloutConfig:
    """`rollout` with its slots and pages dealt to as many places as there are on a mesh, or to one
    if it says so. Raises UserError where they cannot be."""
    if rollout.places not in (None, 1, there):
        raise UserError(f"rollout.places={rollout.places}: the mesh has {there}, or all are one")
    if rollout.places is None and rollout.slots % there:
        raise UserError(
            f"rollout.slots={rollout.slots} must be a multiple of the mesh's {there} places; "
            "with rollout.places=1 each has all slots and pages"
        )
    try:
        return dataclasses.replace(rollout, places=rollout.places or there)
    except ValueError as error:  # too few pages for so many places
        raise UserError(f"rollout: {error}") from None
