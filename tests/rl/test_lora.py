"""Adapters: nothing at first, trained alone, and the same merged, exported and under `peft`."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_policy import MODEL, packed, parameters
from synthetic import agentic
from test_step import assert_close, precision

from forge_jax.attention.reference import reference_attention
from forge_jax.config import LoraConfig, OptimConfig, UserError
from forge_jax.models import transformer
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder
from forge_jax.models.hf_lora import export_adapter, import_adapter
from forge_jax.models.layers import linear
from forge_jax.models.layout import draw, init
from forge_jax.models.lora import adapt, adapters_layout, merge, tuned
from forge_jax.rl import step
from forge_jax.rl.losses import negative_log_likelihood
from forge_jax.rl.state import create
from forge_jax.rl.step import StepConfig
from forge_jax.trees import is_param

LORA = LoraConfig(rank=3, alpha=5.0)
CFG = StepConfig(model=MODEL, ratio_cap=1.5, lora=LORA, attention="reference")
ALONE = dataclasses.replace(CFG, lora=LoraConfig())
SAMPLES = agentic(0, MODEL.vocab)
ROWS = np.random.default_rng(0).integers(0, MODEL.vocab, (2, 12), dtype=np.int32)


def adapters(dtype: str = "float32", cfg: LoraConfig = LORA, zero: bool = False) -> Any:
    """Fresh adapters, or such whose second matrices are not 0 any more."""
    described = adapters_layout(MODEL, cfg)
    if not zero:
        std = 0.2
        described = jax.tree.map(lambda p: p._replace(std=std), described, is_leaf=is_param)
    return draw(described, jax.random.key(2), jnp.dtype(dtype))


def computed(params: Any, cfg: StepConfig = CFG) -> dict[str, Any]:
    found = step.gather(params, packed(SAMPLES, "tree"), cfg)
    return jax.device_get({"loss": found.loss, "logp": found.logp, "grads": found.grads})


@partial(jax.jit, static_argnames=("model", "lora"))
def forward(params: Any, rows: Any, model: ModelConfig, lora: LoraConfig) -> Any:
    """Causal logits of whole rows, adapters beside the weights."""
    whole, place = adapt(params, lora), jnp.arange(rows.shape[1])

    def attend(q: Any, k: Any, v: Any, cache: None) -> tuple[Any, None]:
        last = jnp.full_like(place, rows.shape[1])
        return reference_attention(q, k, v, place, place, last, model.head_dim**-0.5)[0], cache

    def row(tokens: Any) -> Any:
        h = transformer.hidden(whole, tokens, place, attend, model)[0]
        return transformer.logits(whole, h, model)

    return jax.vmap(row)(rows)


def test_fresh_adapters_change_nothing() -> None:
    base = parameters()
    pair = tuned(base, adapters(zero=True))
    jax.tree.map(np.testing.assert_array_equal, merge(pair, LORA), base)
    x = np.random.default_rng(0).normal(size=(7, MODEL.heads, MODEL.head_dim)).astype(np.float32)
    for layer in range(MODEL.layers):
        adapted, alone = (
            jax.tree.map(lambda w, i=layer: w[i], tree["layers"]["o"])
            for tree in (adapt(pair, LORA), base)
        )
        np.testing.assert_array_equal(linear(x, adapted, 2), linear(x, alone, 2))
    # In one program products may be merged and then rounded otherwise.
    found, wanted = forward(pair, ROWS, MODEL, LORA), forward(base, ROWS, MODEL, LORA)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", [LORA.targets, ("o", "v")])
def test_adapters_are_what_they_add_to_the_weights(targets: tuple[str, ...]) -> None:
    lora = dataclasses.replace(LORA, targets=targets)
    whole = dataclasses.replace(CFG, dtype="float64", lora=LoraConfig())
    with precision("float64"):
        base, pairs = parameters("float64"), adapters("float64", lora)
        found = computed(tuned(base, pairs), dataclasses.replace(CFG, dtype="float64", lora=lora))
        merged = merge(tuned(base, pairs), lora)
        wanted = computed(merged, whole)
        # Through W + scale A B, by the chain rule from the gradients of W.
        _, back = jax.vjp(lambda pairs: merge(tuned(base, pairs), lora)["layers"], pairs)
        through = back(jax.tree.map(jnp.asarray, wanted["grads"]["layers"]))[0]
        assert_close(found["logp"], wanted["logp"], 1e-12)
        assert found["grads"].keys() == {"layers"}
        assert found["grads"]["layers"].keys() == set(targets)
        assert_close(found["grads"], jax.device_get(through), 1e-10)
        assert np.abs(found["logp"] - computed(base, whole)["logp"]).max() > 0.1


def test_merged_and_beside_agree_in_float32() -> None:
    pair = tuned(parameters(), adapters())
    beside, merged = (forward(x, ROWS, MODEL, LORA) for x in (pair, merge(pair, LORA)))
    np.testing.assert_allclose(beside, merged, rtol=0, atol=1e-5)


def test_adapters_of_a_bfloat16_model_are_trained_in_float32() -> None:
    base, pairs = parameters("bfloat16"), adapters()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    found = computed(tuned(base, pairs), dataclasses.replace(CFG, dtype="bfloat16"))
    wanted = computed(tuned(wide, pairs))
    assert {g.dtype for g in jax.tree.leaves(found["grads"])} == {np.dtype(np.float32)}
    assert_close(found["grads"], wanted["grads"], 0.05)
    assert np.abs(found["logp"] - wanted["logp"]).max() > 1e-4  # layers were in bfloat16
    merged = merge(tuned(wide, pairs), LORA)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), merged)
    jax.tree.map(np.testing.assert_array_equal, merge(tuned(base, pairs), LORA), rounded)


@pytest.fixture(scope="module")
def trained() -> Any:
    """Base, trained adapters, and the losses on the way; the base is copied before."""
    cfg = dataclasses.replace(
        CFG, loss=negative_log_likelihood, optim=OptimConfig(learning_rate=3e-2)
    )
    base = parameters()
    before = jax.device_get(base)
    state, losses = create(adapters(zero=True), cfg.optim), []
    for _ in range(12):
        state, done = step.update(state, packed(SAMPLES, "tree"), cfg, base=base)
        losses.append(done.loss)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(base))
    return base, state, losses


def test_adapters_alone_are_trained(trained: Any) -> None:
    _, state, losses = trained
    assert losses[-1] < 0.7 * losses[0]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params)) == 2 * 14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, trained: Any) -> Path:
    """The base, its adapter and both merged, as folders."""
    folder = tmp_path_factory.mktemp("exports")
    base, state, _ = trained
    export_folder(folder / "base", MODEL, base)
    export_adapter(folder / "adapter", MODEL, state.params, LORA, str(folder / "base"))
    export_folder(folder / "merged", MODEL, merge(tuned(base, state.params), LORA))
    return folder


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_has_the_logits_of_adapters_and_of_the_merged_model(
    folders: Path, trained: Any
) -> None:
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft, the oracle, is not installed")
    transformers.utils.logging.disable_progress_bar()
    base, state, _ = trained
    ids = torch.as_tensor(ROWS, dtype=torch.long)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        alone = load(folders / "base").eval()
        plain = alone(ids).logits.numpy()
        beside = peft.PeftModel.from_pretrained(alone, folders / "adapter").eval()
        adapted = beside(ids).logits.numpy()
        merged = load(folders / "merged").eval()(ids).logits.numpy()
    ours = forward(tuned(base, state.params), ROWS, MODEL, LORA)
    assert np.abs(ours - plain).max() > 0.5
    np.testing.assert_allclose(adapted, ours, rtol=0, atol=1e-4)
    np.testing.assert_allclose(merged, ours, rtol=0, atol=1e-4)


def test_an_adapter_is_written_and_read_bit_for_bit(folders: Path, trained: Any) -> None:
    _, state, _ = trained
    lora, back = import_adapter(folders / "adapter", MODEL)
    assert lora == LORA
    jax.tree.map(np.testing.assert_array_equal, back, state.params)
    export_adapter(folders / "adapter", MODEL, state.params, LORA, "base")  # replaces it
    some = dataclasses.replace(LORA, targets=("q", "down"))
    export_adapter(folders / "some", MODEL, adapters(cfg=some), some, "base")
    assert import_adapter(folders / "some", MODEL)[0] == some


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "use_dora=True is unsupported"),
        ("peft_type", "IA3", "peft_type='IA3' is unsupported"),
        ("r", 4, "and r=4 say"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights='pissa_niter_4' is unsupported"),
        ("init_lora_weights", "loftq", "init_lora_weights='loftq' is unsupported"),
        ("lora_alpha", 0, "alpha=0"),
    ],
)
def test_other_variants_of_the_method_are_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    export_adapter(tmp_path / "adapter", MODEL, adapters(), LORA, "base")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=message):
        import_adapter(tmp_path / "adapter", MODEL)


@pytest.mark.parametrize("value", [True, False, "gaussian"])
def test_how_an_adapter_began_does_not_matter(tmp_path: Path, value: Any) -> None:
    export_adapter(tmp_path / "adapter", MODEL, adapters(), LORA, "base")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": value}))
    assert import_adapter(tmp_path / "adapter", MODEL)[0] == LORA


def test_tensors_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    export_adapter(tmp_path / "adapter", MODEL, adapters(), LORA, "base")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    flat = safetensors.numpy.load_file(file)
    head = {"base_model.model.lm_head.lora_A.weight": np.ones((3, 16), np.float32)}
    safetensors.numpy.save_file(flat | head, file)
    with pytest.raises(UserError, match=r"lm_head\.lora_A\.weight is unexpected"):
        import_adapter(tmp_path / "adapter", MODEL)
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        export_adapter(tmp_path / "adapter", MODEL, adapters(), LORA, "base")


def test_experts_are_not_adapted() -> None:
    routed = dataclasses.replace(MODEL, family="qwen3_moe", experts=4, experts_per_token=2)
    with pytest.raises(UserError, match=r"lora\.targets=q,k,v,o,gate,up,down: experts"):
        adapters_layout(routed, LORA)
    attention = dataclasses.replace(LORA, targets=("q", "k", "v", "o"))
    described = adapters_layout(routed, attention)
    pairs = jax.tree.map(lambda p: p._replace(std=0.2), described, is_leaf=is_param)
    pair = tuned(init(routed, jax.random.key(0)), draw(pairs, jax.random.key(1), jnp.float32))
    beside = forward(pair, ROWS, routed, attention)
    merged = forward(merge(pair, attention), ROWS, routed, attention)
    assert np.abs(beside - forward(pair.base, ROWS, routed, attention)).max() > 0.1
    np.testing.assert_allclose(beside, merged, rtol=0, atol=1e-4)
