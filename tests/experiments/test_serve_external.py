"""The gateway before an engine elsewhere."""

import asyncio
import json
from contextlib import suppress

import httpx
import pytest
from openai import AsyncOpenAI
from refusals import refused
from stand_in_engines import standing_apart

from experiments.models import resolve
from experiments.serve import answer, main
from experiments.serve_config import Config
from forge_jax.config import RolloutConfig

BEHIND = RolloutConfig(context=48, slots=4)
URL = "engine_url=http://127.0.0.1:9"


def test_a_server_before_an_engine_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    async def run(elsewhere: str) -> None:
        cfg = Config(engine="vllm", engine_url=elsewhere, model="quick", admin_key="secret")
        serving, out = asyncio.create_task(answer(cfg)), ""
        while not out:
            await asyncio.sleep(0.01)
            out = capsys.readouterr().out
        await use(json.loads(out)["url"])
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    async def use(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/s/a/v1", api_key="k", max_retries=0) as client:
            got = await client.completions.create(
                model="m", prompt=[1, 2, 3], seed=3, max_tokens=9, logprobs=0,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        bearer = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url) as http:
            [turn] = (await http.get("/sessions/a", headers=bearer)).json()["turns"]
            long = await http.post("/v1/completions", json={"prompt": [1] * 48})
            metrics = (await http.get("/metrics")).text
        ids = got.choices[0].model_extra["token_ids"]
        assert turn["output_ids"] == ids
        assert turn["logprobs"] == pytest.approx(got.choices[0].logprobs.token_logprobs)
        assert turn["versions"] == [0] * len(ids)
        assert (long.status_code, "context_length_exceeded" in long.text) == (400, True)
        assert 'vllm:num_requests_running{model_name="quick"} 0.0' in metrics

    with standing_apart(resolve("quick"), BEHIND) as url:
        asyncio.run(run(url))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("engine=vllm", URL, "model=quick"), "engine_url=http://127.0.0.1:9: no engine"),
        (("engine=vllm", "model=quick"), "engine_url=null: engine=vllm needs one"),
        (("engine=sglang", URL), "engine=sglang needs a model"),
        (("model=quick", URL), "engine_url='http://127.0.0.1:9' goes with"),
        (("engine=vllm", URL, "model=quick", "rollout.slots=3"), "rollout but for context"),
        (("engine=vllm", URL, "model=quick", "replicas=2"), "replicas=2 goes with engine=real"),
        (("engine=vllm", URL, "model=quick", "external.key_variable=NO_KEY"), "NO_KEY"),
    ],
)
def test_refusals(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused(main, *overrides)
