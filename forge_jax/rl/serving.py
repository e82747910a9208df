"""A rollout engine behind a gateway, with the client all agents share.

A model and its weights go in; a URL that speaks the wire protocols comes out, for as
long as the context is open.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from forge_jax.agents.threads import Threads
from forge_jax.config import RolloutConfig, TrainConfig
from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.load import LoadedModel
from forge_jax.rl.health import Health, supervised
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.external.engine import ExternalEngine
from forge_jax.rollout.external.published import Folder
from forge_jax.rollout.policy import PolicyEngine


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is up while the context is open."""

    engine: PolicyEngine
    gateway: Gateway
    url: str
    client: AsyncOpenAI
    health: Health
    threads: Threads = field(default_factory=Threads)  # that worlds compute in


@asynccontextmanager
async def serving(
    model: LoadedModel,
    params: Any,
    version: int,
    cfg: RolloutConfig,
    device: Executor,
    elsewhere: ExternalEngine | None = None,
) -> AsyncIterator[Serving]:
    """Serves a copy of `params`, taken before any later job of `device`, as `version`; by an
    engine of our own or, if there is one, `elsewhere`.

    An engine of our own that fails serves again, see `supervised`, and so does the gateway's
    server; a fault that stays, or one of an engine elsewhere, ends the body of the context.
    """
    engine: PolicyEngine = elsewhere or RolloutEngine(
        model.cfg,
        params,
        stop_ids=model.chat.stop_ids,
        rollout=cfg,
        tokenizer=model.chat.tokenizer,
        device=device,
        version=version,
    )
    # Only the sessions a player opened exist: a late call of an ended episode is refused.
    gateway = Gateway(
        engine,
        model.chat,
        model.name,
        admin_key=secrets.token_urlsafe(),
        config=GatewayConfig(undeclared=False),
    )
    await engine.warm_up()  # what it refuses is no group of exceptions
    async with asyncio.TaskGroup() as group:
        if elsewhere is not None:
            await elsewhere.swap(version, params)
        health = Health()
        served = engine.serve() if elsewhere is not None else supervised(engine.serve, health)
        running = group.create_task(served)
        async with gateway.running() as url, shared_client(url) as client:
            yield Serving(engine=engine, gateway=gateway, url=url, client=client, health=health)
        running.cancel()


def engine_elsewhere(
    cfg: TrainConfig, model: LoadedModel, folder: Path, version: int, device: Executor
) -> ExternalEngine | None:
    """The engine that `cfg` names, None where it is our own; it reads weights from `folder`
    unless `cfg` has another. Raises UserError where its key is missing."""
    if cfg.engine_url is None:
        return None
    root = folder if cfg.external.folder is None else Path(cfg.external.folder)
    return ExternalEngine(
        cfg.engine,
        cfg.engine_url,
        cfg.external,
        context=cfg.rollout.context,
        stop_ids=model.chat.stop_ids,
        tokenizer=model.chat.tokenizer,
        folder=Folder(root, model.cfg, cfg.rollout.dtype, device),
        version=version,
    )


def shared_client(url: str) -> AsyncOpenAI:
    """A client for any number of agents at once: one connection pool, no retries.

    What the server answers, an error too, is the agent's to see.
    """
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=None)
