"""Supervised warm start: scripted play in, a policy that knows the format out.

Every assistant turn of a scripted episode is a sample exactly as the gateway would
have fed and recorded it, or has (`demonstrate`); the loss is its negative
log-likelihood, through the same merge and the same train step as RL.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.agents.families import play_of
from forge_jax.config import ContextConfig, ProtectConfig, TrainConfig
from forge_jax.models.chat import Chat
from forge_jax.rl.guard import Guard
from forge_jax.rl.parallel import update
from forge_jax.rl.prefetch import prefetch
from forge_jax.rl.state import TrainState
from forge_jax.rl.step import StepConfig, Updated
from forge_jax.sched.pack import micro_batches
from forge_jax.types import MicroBatch, Sample


def warm_start(
    state: TrainState,
    *,
    first: int,
    samples: Callable[[int], list[Sample]],
    cfg: TrainConfig,
    step_cfg: StepConfig,
    on_step: Callable[[int, TrainState, Updated], None],
    base: Any = None,
) -> TrainState:
    """Steps `first` to `cfg.warm.steps` of imitation of what `samples` gives for each; `on_step`
    is called after each. With a `base` its adapters are trained. Raises UserError where too many
    steps in a row are not finite."""

    def plan(step: int) -> list[MicroBatch]:
        carry = not cfg.mtp.weight
        return micro_batches(samples(step), "tree", cfg.pack, mesh=cfg.mesh, carry=carry)

    guard = Guard(ProtectConfig(most_skipped=cfg.protect.most_skipped))
    steps = range(first, cfg.warm.steps + 1)
    for step, trees in zip(steps, prefetch(plan, steps), strict=True):
        state, done = update(state, trees, step_cfg, base)
        guard.row(done)
        on_step(step, state, done)
        guard.check()
    return state


def scripted_samples(
    family: str,
    chat: Chat,
    episodes: int,
    seed: int,
    step: int,
    context: ContextConfig | None = None,
    levels: Sequence[int] = (0,),
) -> list[Sample]:
    """The samples of `episodes` scripted episodes, at all `levels` in turn from step to step; the
    same for the same arguments."""
    rng = np.random.default_rng([seed, step])
    plays = [play_of(family, context, level) for level in levels]
    return [
        reply_sample(chat, call.messages, call.tools, call.reply)
        for number in range(step * episodes, (step + 1) * episodes)
        for call in plays[number % len(plays)](rng)
    ]


def reply_sample(
    chat: Chat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
) -> Sample:
    """One call: the rendered messages as context, the reply up to its end of turn, trained.

    Raises ValueError as `written`.
    """
    prompt, text = written(chat, messages, tools, reply)
    return imitated(chat.tokenizer.encode(prompt), chat.tokenizer.encode(text))


def written(
    chat: Chat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
) -> tuple[str, str]:
    """The rendered messages, and the reply behind them up to its end of turn.

    Raises ValueError if the template does not render the reply behind its prompt.
    """
    prompt = chat.format.render(messages, tools)
    whole = chat.format.render([*messages, reply], tools, add_generation_prompt=False)
    end = whole.find(chat.format.end_of_turn, len(prompt))
    if not whole.startswith(prompt) or end < 0:
        raise ValueError(f"the chat template does not continue {prompt[-40:]!r} by a closed reply")
    return prompt, whole[len(prompt) : end + len(chat.format.end_of_turn)]


def imitated(context: Sequence[int] | np.ndarray, output: Sequence[int] | np.ndarray) -> Sample:
    """A sample of which all of `output` is trained, behind `context`."""
    mask = np.arange(len(context) + len(output)) >= len(context)
    return Sample(
        tokens=np.concatenate([context, output]).astype(np.int32),
        mask=mask,
        old_logp=np.zeros(len(mask), np.float32),
        advantage=mask.astype(np.float32),
    )
