"""Prompts told back: echoed, and their log-probs as vLLM and OpenAI tell them."""

import httpx
import pytest
from fake_engine import chat_of, run, served, text_engine

ENTRIES = [
    None,
    {
        "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -0.5, "rank": 2, "decoded_token": "B"},
    },
]
ECHOED = {
    "tokens": ["a", "b"],
    "token_logprobs": [None, -1.0],
    "top_logprobs": [None, {"A": 0.0}],
    "text_offset": [0, 1],
}


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_completions_tell_prompt_logprobs_in_every_choice_and_ask_for_them_once(prompt) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "cd")
        async with served(engine, chat) as up:
            body = {"prompt": prompt, "n": 2, "prompt_logprobs": 2}
            answer = (await up.post("/v1/completions", body)).json()
            assert [c["prompt_logprobs"] for c in answer["choices"]] == [ENTRIES] * 2
            assert [c["logprobs"] for c in answer["choices"]] == [None] * 2
            asked = [request.sampling.prompt_logprobs for request in engine.requests]
            assert sorted(asked, key=str) == [2, None]
            none = (await up.post("/v1/completions", {"prompt": prompt})).json()
            assert "prompt_logprobs" not in none["choices"][0]

    run(test)


def test_a_chat_tells_them_of_the_prompt_as_it_was_rendered() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "cd"), chat) as up:
            body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
            answer = (
                await up.post("/v1/chat/completions", body | {"return_token_ids": True})
            ).json()
            ids, told = answer["prompt_token_ids"], answer["prompt_logprobs"]
            assert told[0] is None
            assert [[*entry] for entry in told[1:]] == [[str(token)] for token in ids[1:]]

    run(test)


def test_an_echo_has_the_prompt_before_the_completion() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "cd")
        async with served(engine, chat) as up:

            async def post(**more) -> dict:
                body = {"prompt": "ab", "echo": True, "ignore_eos": False, **more}
                answer = await up.post("/v1/completions", body)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]

            plain = await post()
            assert (plain["text"], plain["logprobs"]) == ("abcd", None)
            assert engine.requests[-1].sampling.prompt_logprobs is None
            told = (await post(logprobs=1))["logprobs"]
            assert told["tokens"] == ["a", "b", "c", "d", "<|im_end|>"]
            assert told["token_logprobs"] == [None, -1.0, 0.0, -0.125, -0.25]
            assert told["top_logprobs"][:3] == [None, {"A": 0.0}, {"c": 0.0}]
            assert told["text_offset"] == [0, 1, 2, 3, 4]
            bare = (await post(logprobs=0))["logprobs"]
            assert bare["top_logprobs"] is None
            assert bare["token_logprobs"] == told["token_logprobs"]
            assert (await post(logprobs=1, prompt_logprobs=2))["prompt_logprobs"] == ENTRIES
            stream = await up.client.completions.create(
                model="m", prompt="ab", echo=True, stream=True
            )
            assert "".join([c.choices[0].text async for c in stream if c.choices]) == "abcd"

    run(test)


def test_a_prompt_alone_is_scored_and_what_was_sampled_is_nobodys() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "cd"), chat) as up:
            body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
            answer = (await up.post("/s/one/v1/completions", body)).json()
            [choice] = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
            assert choice["logprobs"] == ECHOED
            assert answer["usage"]["completion_tokens"] == 0
            [turn] = await up.turns("one")
            assert (len(turn["output_ids"]), turn["finish_reason"]) == (1, "abort")

    run(test)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs=1"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream=True"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "stream=True"),
    ],
)
def test_what_cannot_be_told_is_refused(body: dict, named: str) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "cd"), chat) as up:
            answer: httpx.Response = await up.post("/v1/completions", {"prompt": "ab", **body})
            assert answer.status_code == 400
            assert named in answer.json()["error"]["message"]

    run(test)
