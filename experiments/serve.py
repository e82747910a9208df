"""Serves a model to agents: gateway and engine in one process, until SIGTERM.

    python -m experiments.serve model=NAME_OR_DIR [port=8000] [host=127.0.0.1]
    python -m experiments.serve engine=scripted script=FILE.json [model=NAME_OR_DIR]
    python -m experiments.serve engine=vllm|sglang engine_url=http://... model=NAME_OR_DIR

Prints one JSON line with the URL when it can answer; it is the last line of stdout.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.command import command
from experiments.serve_config import Config
from experiments.watch import watched
from forge_jax.config import UserError, load
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.observe.exposition import Stats
from forge_jax.rollout.router.live import Router
from forge_jax.rollout.script import read_script
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Engine

if TYPE_CHECKING:
    from jax.sharding import Mesh

Opened = tuple[Engine, Stats, Chat, str]  # with the name of the model


@command("serve")
def main(mapping: dict[str, Any]) -> None:
    asyncio.run(serve(load(Config, mapping)))


async def serve(cfg: Config) -> None:
    """Serves until SIGTERM or SIGINT, at whatever moment, and lets running calls end."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping, answering = map(asyncio.ensure_future, (stop.wait(), answer(cfg)))
    await asyncio.wait((stopping, answering), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


async def answer(cfg: Config) -> None:
    """Tells when it can answer, and answers until it is cancelled."""
    openers = {"scripted": scripted_engine, "real": real_engine}
    opened = openers.get(cfg.engine, external_engine)(cfg)
    with admin_key(cfg.admin_key) as (key, file):
        async with opened as (made, stats, chat, name):
            with watched(cfg.watch, made, stats, name) as (engine, exposition):
                gateway = Gateway(engine, spoken(cfg, chat), name, key, cfg.gateway, exposition)
                await answer_through(gateway, cfg, name, file)


def spoken(cfg: Config, chat: Chat) -> Chat:
    """`chat`, with the formats that were asked for by name."""
    form = chat.format
    tool_format, reasoning = cfg.tool_format or form.tool_format, cfg.reasoning or form.reasoning
    return replace(chat, format=replace(form, tool_format=tool_format, reasoning=reasoning))


async def answer_through(gateway: Gateway, cfg: Config, name: str, file: str | None) -> None:
    """Prints the ready line, and answers until it is cancelled."""
    async with gateway.running(cfg.host, cfg.port) as url:
        ready = {"url": url, "model": name, "ready": True}
        if file is not None:
            ready["admin_key_file"] = file
        print(json.dumps(ready), flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def scripted_engine(cfg: Config) -> AsyncIterator[Opened]:
    """An engine that answers from a script, in the chat format of `model` if there is one."""
    if cfg.model is None:
        chat, name = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml")), "scripted"
    else:
        from experiments.models import resolve  # brings jax, which a script alone does not need

        model = resolve(cfg.model, cfg.seed)
        chat, name = model.chat, model.name
    assert cfg.script is not None
    rules = read_script(cfg.script)
    engine = ScriptedEngine(rules, chat.tokenizer, stop_id=chat.stop_ids[0])
    yield engine, dict, chat, name


@asynccontextmanager
async def external_engine(cfg: Config) -> AsyncIterator[Opened]:
    """An engine elsewhere, with the tokenizer and the chat format of `model`."""
    from experiments.models import chat_of
    from forge_jax.rollout.external.engine import ExternalEngine

    assert cfg.model is not None
    assert cfg.engine_url is not None
    chat, name = chat_of(cfg.model)
    engine = ExternalEngine(
        cfg.engine,
        cfg.engine_url,
        cfg.external,
        context=cfg.rollout.context,
        stop_ids=chat.stop_ids,
        tokenizer=chat.tokenizer,
        folder=None,
    )
    await engine.warm_up()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.serve())
        yield engine, engine.stats, chat, name
        running.cancel()


@asynccontextmanager
async def real_engine(cfg: Config) -> AsyncIterator[Opened]:
    """Compiled rollout engines on the model, a router before them if they are several; the
    fault of the last one ends the block."""
    import jax

    from experiments.models import resolve
    from forge_jax.rollout.disaggregated import DisaggregatedEngine, decoding
    from forge_jax.rollout.engine import RolloutEngine
    from forge_jax.sharding import mesh_from

    assert cfg.model is not None
    engines: dict[str, RolloutEngine] = {}
    with ExitStack() as stack:
        places = meshes(cfg)
        used = sum(mesh.size for mesh in places)
        if cfg.prefill is not None:
            places = [*places, mesh_from(cfg.prefill, jax.devices()[used:])]
        last = len(places) - 1
        for number, mesh in enumerate(places):
            model = resolve(cfg.model, cfg.seed, mesh=mesh)
            sizes = cfg.rollout.of(model.cfg.max_context)
            most = model.cfg.max_context
            if sizes.context > most:
                raise UserError(
                    f"rollout.context={sizes.context} exceeds the {most} of {model.name}"
                )
            engines[str(number)] = RolloutEngine(
                model.cfg,
                model.params,
                stop_ids=model.chat.stop_ids,
                rollout=decoding(sizes) if cfg.prefill is not None and number < last else sizes,
                tokenizer=model.chat.tokenizer,
                device=stack.enter_context(ThreadPoolExecutor(1, f"device-{number}")),
                seed=cfg.seed,
            )
        engine: RolloutEngine | Router | DisaggregatedEngine = engines["0"]
        if cfg.prefill is not None:
            *decode, prefill = engines.values()
            engine = DisaggregatedEngine([prefill], decode, sizes)
        elif len(engines) > 1:
            engine = Router(engines, sizes, cfg.router, cfg.seed)
        print(f"{model.name}: compiling", file=sys.stderr, flush=True)
        await engine.warm_up()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.serve())
            yield engine, engine.stats, model.chat, model.name
            running.cancel()


def meshes(cfg: Config) -> "list[Mesh]":
    """Of each replica; on devices of its own where there are enough for all of them."""
    import jax

    from forge_jax.sharding import mesh_from

    size, devices = mesh_from(cfg.mesh).size, jax.devices()
    if cfg.replicas * size > len(devices):
        if cfg.replicas > 1:
            print(f"replicas={cfg.replicas} share {size} device(s)", file=sys.stderr)
        return [mesh_from(cfg.mesh)] * cfg.replicas
    return [
        mesh_from(cfg.mesh, devices[place * size : (place + 1) * size])
        for place in range(cfg.replicas)
    ]


@contextmanager
def admin_key(given: str | None) -> Iterator[tuple[str, str | None]]:
    """The key of the admin routes, and the file it was written to if it was generated.

    The file can be read by this user alone, and goes with the server.
    """
    if given is not None:
        yield given, None
        return
    key = secrets.token_urlsafe(32)
    descriptor, path = tempfile.mkstemp(prefix="forge_jax-admin-key-")  # of mode 600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key)
        yield key, path
    finally:
        os.unlink(path)


if __name__ == "__main__":
    main()
