"""The command serves: ready line, a whole task, records, drain on SIGTERM, exit codes."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from refusals import refused

from experiments.serve import main
from experiments.serve_config import Sizes
from forge_jax.config import RolloutConfig

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
SCRIPT = [
    {"when": {"call": 2, "tools": False}, "fail_status": 429},
    {"when": {"contains": "slowly"}, "text": "done", "delay_seconds": 1.5},
    {"when": {"tool_result": True}, "text": "It is 42.", "chunks": 3},
    {
        "when": {"tools": True},
        "text": 'Look.<tool_call>{"name": "{tool}", "arguments": {arguments}}</tool_call>',
    },
    {"text": "Hello."},
]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """The ready line and the process of a server, which is terminated if need be."""
    command = [sys.executable, "-m", "experiments.serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), process
        finally:
            process.kill()


def stopped(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and rest of stdout after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


def script_file(folder: Path) -> str:
    file = folder / "script.json"
    file.write_text(json.dumps(SCRIPT))
    return str(file)


def test_a_scripted_server(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    options = ("engine=scripted", f"script={script_file(tmp_path)}", f"watch.log={log}")
    with serving(*options) as (ready, process):
        assert set(ready) == {"url", "model", "ready", "admin_key_file"}
        assert ready["ready"] is True
        key_file = ready["admin_key_file"]
        assert stat.S_IMODE(os.stat(key_file).st_mode) == 0o600
        with OpenAI(base_url=f"{ready['url']}/s/a/v1", api_key="k", max_retries=2) as client:
            talk: list[Any] = [{"role": "user", "content": "What is k1?"}]
            create = client.chat.completions.create
            reply = create(model="m", messages=talk, tools=[TOOL]).choices[0].message
            call = reply.tool_calls[0]
            assert json.loads(call.function.arguments).keys() == {"key"}
            talk += [reply.model_dump(exclude_none=True)]
            talk += [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
            told = create(model="m", messages=talk, tools=[TOOL], stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in told) == "It is 42."
            # The third call fails once; the client recovers.
            assert create(model="m", messages=talk[:1]).choices[0].message.content == "Hello."
        bearer = {"authorization": f"Bearer {Path(key_file).read_text()}"}
        record = httpx.get(f"{ready['url']}/sessions/a", headers=bearer).json()
        assert [turn["parent"] for turn in record["turns"]] == [None, 0, None]
        assert httpx.get(f"{ready['url']}/sessions/a").status_code == 401
        metrics = httpx.get(f"{ready['url']}/metrics").text
        assert 'finished_reason="stop",model_name="scripted"} 3' in metrics
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["finish"] for line in lines] == ["stop", "stop", "refused", "stop"]
        # SIGTERM lets the running call end.
        answers: list[httpx.Response] = []
        body = {"messages": [{"role": "user", "content": "slowly"}]}
        url = f"{ready['url']}/v1/chat/completions"
        calling = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body)))
        calling.start()
        while "forge_calls_running 1" not in httpx.get(f"{ready['url']}/metrics").text:
            pass
        assert stopped(process) == (0, "")
        calling.join()
        assert answers[0].json()["choices"][0]["message"]["content"] == "done"
        assert not os.path.exists(key_file)


APART = ("mesh.data=2", "prefill={tensor: 2}", "rollout.store=memory://", "rollout.host_pages=9")


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        ("mesh.data=2", "mesh.tensor=2"),
        APART,
        pytest.param(("replicas=2",), marks=pytest.mark.slow),
    ],
    ids=["one", "mesh", "apart", "replicas"],
)
def test_a_real_server(mesh: tuple[str, ...]) -> None:
    options = ("model=quick", "admin_key=secret", "rollout.slots=2", "rollout.context=32")
    with serving(*options, *mesh) as (ready, process):
        assert set(ready) == {"url", "model", "ready"}
        with OpenAI(base_url=f"{ready['url']}/v1", api_key="k", max_retries=0) as client:
            ask: dict[str, Any] = {
                "model": "m", "prompt": [65, 66, 67], "max_tokens": 4, "seed": 1, "n": 3,
                "logprobs": 0, "extra_body": {"return_token_ids": True, "ignore_eos": True},
            }  # fmt: skip
            first, again = (client.completions.create(**ask).choices for _ in range(2))
            told = [(c.token_ids, c.logprobs.token_logprobs) for c in first]
            assert told == [(c.token_ids, c.logprobs.token_logprobs) for c in again]
            assert len({tuple(ids) for ids, _ in told}) > 1
            for choice in first:
                assert choice.finish_reason == "length"
                assert choice.prompt_token_ids == [65, 66, 67]
                assert choice.weight_versions == [0] * 4
                assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs)
            tokens = [65, 66, 67, *first[0].token_ids]
            ask |= {"prompt": tokens, "n": 1, "echo": True, "max_tokens": 0}
            [scored] = client.completions.create(**ask).choices
            assert scored.logprobs.token_logprobs[3:] == pytest.approx(told[0][1], abs=1e-4)
            ask = {"model": "m", "prompt": "x", "extra_body": {"guided_choice": ["yes", "no"]}}
            [chosen] = client.completions.create(**ask).choices
            assert chosen.text in ("yes", "no")
            assert chosen.finish_reason == "stop"
        for prompt, code in (([1] * 40, "context_length_exceeded"), ([70_000], None)):
            answer = httpx.post(f"{ready['url']}/v1/completions", json={"prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        bearer = {"authorization": "Bearer secret"}
        turns = httpx.get(f"{ready['url']}/sessions/k", headers=bearer).json()["turns"]
        assert len(turns) == 8
        assert stopped(process) == (0, "")


@pytest.mark.slow  # two servers, which differ in who drafts
def test_a_server_that_drafts_answers_the_same_tokens() -> None:
    ask = {
        "prompt": [65, 66] * 4, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    told = []
    with ExitStack() as stack:
        options = ("model=quick", "rollout.slots=2", "rollout.context=32")
        for more in ((), ("rollout.speculate=ngram", "rollout.drafts=1")):
            ready, _ = stack.enter_context(serving(*options, *more))
            answer = httpx.post(f"{ready['url']}/v1/completions", json=ask, timeout=60).json()
            told.append(answer["choices"][0])
        metrics = httpx.get(f"{ready['url']}/metrics").text
    assert told[0]["token_ids"] == told[1]["token_ids"]
    told_logprobs = (one["logprobs"]["token_logprobs"] for one in told)
    np.testing.assert_allclose(*told_logprobs, atol=1e-4)
    [acceptance] = re.findall(r"^forge_acceptance\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert 0 < float(acceptance) <= 1
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total{" in metrics


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_before_it_is_ready_leaves_nothing(
    tmp_path: Path, number: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.serve", "model=quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "quick: compiling\n"
        assert [file.name for file in tmp_path.glob("*admin-key*")]
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert not list(tmp_path.glob("*admin-key*"))


def test_sizes_are_those_of_the_engine() -> None:
    sizes = {"slots": 3, "context": 24, "chunk": 32, "decode_steps": 5, "dtype": "bfloat16"}
    sizes |= {"speculate": "mtp", "drafts": 3}
    served = {"shaping": True, "top_logprobs": 20, "prompt_logprobs": 20, "support": 64}
    assert Sizes(**sizes).of(64) == RolloutConfig(**sizes, **served)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("model=nonesuch", "model='nonesuch'"),
        ("model=", "model=''"),
        ("model=tests", "model='tests'"),
        ("model=quick rollout.context=9999", "rollout.context=9999"),
        ("engine=scripted", "script=null: engine=scripted needs one"),
        ("engine=scripted script=x.json mesh=host", "mesh goes with engine=real"),
        ("model=quick rollout.dtype=int8", "dtype='int8'"),
        ("engine=other", "engine='other'"),
        ("nokey=1", "nokey"),
        ("+nokey=1 model=quick", "nokey=1"),
        ("port=99999 model=quick", "port=99999"),
        ("model=quick tool_format=xml", "tool_format='xml'"),
        ("model=quick reasoning=yes", "reasoning='yes'"),
        ("model=quick mesh.data=9", "mesh data=9 needs 9 devices, found 8"),
    ],
)
def test_mistakes_exit_with_2_and_name_the_key(arguments: str, named: str) -> None:
    assert named in refused(main, *arguments.split())
