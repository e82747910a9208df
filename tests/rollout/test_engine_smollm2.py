"""The engine on real weights: SmolLM2-135M's greedy tokens and log-probs are transformers'."""

import asyncio
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from experiments.models import resolve
from experiments.smollm2 import fetch
from forge_jax.config import RolloutConfig, UserError
from forge_jax.models.load import LoadedModel
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Grammar, Request, Sampling

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="the package gguf is not installed")
torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
transformers = pytest.importorskip("transformers", reason="the oracle is not installed")

SIZES = RolloutConfig(slots=8, context=64, page=8, chunk=32, decode_steps=8, deterministic=True)
TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion were formulated by",
    "My favourite recipe begins with two cups of flour and",
    "In 1969, the first human being walked on",
    "The opposite of hot is",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which plants",
    "The largest planet of the solar system is",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "A triangle has three sides, and a square has",
    "To be, or not to be,",
    "The chemical symbol of gold is",
    "Machine learning is a field of",
    "The quick brown fox jumps over",
    "Question: What is the tallest mountain on Earth?\nAnswer:",
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return resolve(str(weights_file()))


def weights_file() -> Path:
    try:
        return fetch()
    except UserError as error:
        pytest.skip(f"the weights cannot be had here: {error}")


async def written(
    model: LoadedModel, sizes: RolloutConfig, asked: list[tuple[str, dict[str, Any]]]
) -> list[str]:
    """Texts of the answers to prompts with settings, without what ended them."""
    chat = model.chat

    async def one(engine: RolloutEngine, text: str, settings: dict[str, Any]) -> str:
        prompt = np.array(chat.tokenizer.encode(text), np.int32)
        chunks = engine.generate(Request(prompt=prompt, sampling=Sampling(**settings)))
        ids = np.concatenate([chunk.ids async for chunk in chunks]).tolist()
        assert ids[-1] in chat.stop_ids
        return chat.tokenizer.decode(ids[:-1])

    with ThreadPoolExecutor(1) as device:
        engine = RolloutEngine(
            model.cfg, model.params, chat.stop_ids, sizes, chat.tokenizer, device
        )
        serving = asyncio.create_task(engine.serve())
        found = await asyncio.gather(*(one(engine, *each) for each in asked))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return list(found)


async def answers(model, prompts: list[np.ndarray]) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens and their log-probs under softmax(logits), all prompts at once."""

    async def one(engine: RolloutEngine, prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        chunks = [c async for c in engine.generate(Request(prompt=prompt, sampling=sampling))]
        ids = np.concatenate([c.ids for c in chunks]).tolist()
        return ids, np.concatenate([c.raw for c in chunks])

    with ThreadPoolExecutor(1) as device:
        engine = RolloutEngine(model.cfg, model.params, (), SIZES, model.chat.tokenizer, device)
        serving = asyncio.create_task(engine.serve())
        found = await asyncio.gather(*(one(engine, prompt) for prompt in prompts))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return list(found)


def test_greedy_tokens_are_those_of_transformers(model: LoadedModel) -> None:
    file = weights_file()
    prompts = [np.array(model.chat.tokenizer.encode(text), np.int32) for text in PROMPTS]
    ours = asyncio.run(answers(model, prompts))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    for prompt, (ids, logprobs) in zip(prompts, ours, strict=True):
        assert len(ids) == TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt.tolist(), *ids]])).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        # Each is the likeliest after those before it, so together they are the greedy completion.
        assert rows.argmax(-1).tolist() == ids
        expected = rows.log_softmax(-1)[torch.arange(TOKENS), torch.tensor(ids)].numpy()
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_answers_belong_to_grammars_over_its_tokens(model: LoadedModel) -> None:
    choices = Grammar(kind="choice", text='[" London", " Paris", " Rome"]')
    asked = model.chat.format.render([{"role": "user", "content": "Name a city."}])
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "known": {"type": "boolean"}},
        "required": ["city", "known"],
        "additionalProperties": False,
    }
    fields = Grammar(kind="json", text=json.dumps(schema))
    likely = [(PROMPTS[0], {"grammar": choices, "temperature": 0.0})]
    hot = [(asked, {"grammar": fields, "temperature": 1.5, "seed": seed}) for seed in range(3)]
    sizes = dataclasses.replace(SIZES, shaping=True, context=96)
    best, *others = asyncio.run(written(model, sizes, [*likely, *hot]))
    assert best == " Paris"
    for text in others:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(others)) == 3
