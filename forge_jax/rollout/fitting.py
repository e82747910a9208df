"""Whether an engine of some sizes can serve a model: asked before anything is allocated."""

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
