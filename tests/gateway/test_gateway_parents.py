"""Parents of turns: the call whose prompt and output a prompt begins with, whatever was sampled."""

import numpy as np
import pytest
from fake_engine import LOOK, FakeEngine, chat_of, run, served, text_engine
from pair_tokenizer import PairTokenizer

from forge_jax.models.chat import Chat, built_in
from forge_jax.types import Finish, Request


def test_the_continued_choice_is_the_parent() -> None:
    async def test() -> None:
        form = chat_of("lookup")
        end = form.stop_ids[0]
        engine = FakeEngine(lambda r: [63, 97 + r.sampling.choice % 2, end])
        async with served(engine, form) as up:
            client, user = up.of("s"), {"role": "user", "content": "k"}
            first = await client.chat.completions.create(
                model="m", messages=[user], tools=[LOOK], n=4
            )
            for i in (3, 1, 0):
                reply = first.choices[i].message.model_dump()
                result = {"role": "tool", "content": "1"}
                await client.chat.completions.create(
                    model="m", messages=[user, reply, result], tools=[LOOK]
                )
            turns = await up.turns("s")
            # Choices 1 and 3 sampled the same tokens: either is a true parent.
            assert [t["parent"] for t in turns[:4]] == [None] * 4
            assert [turns[t["parent"]]["output_ids"] for t in turns[4:]] == [
                turns[i]["output_ids"] for i in (3, 1, 0)
            ]

    run(test)


def test_of_equal_replies_the_one_sampled_behind_this_prompt_is_spliced() -> None:
    """Two branches reply the same text in other tokens."""

    async def test() -> None:
        form = Chat(tokenizer=PairTokenizer(), format=built_in("chatml"))
        end = form.stop_ids[0]
        replies = [[*form.tokenizer.encode("the"), end], [*b"the", end]]
        engine = FakeEngine(lambda _: replies[len(engine.requests) % 2])
        async with served(engine, form) as up:
            client = up.of("s")
            for user in "ab":
                talk = [{"role": "user", "content": user}]
                await client.chat.completions.create(model="m", messages=talk)
            for user in "ab":
                talk = [
                    {"role": "user", "content": user},
                    {"role": "assistant", "content": "the"},
                    {"role": "user", "content": "go on"},
                ]
                await client.chat.completions.create(model="m", messages=talk)
            assert [t["parent"] for t in await up.turns("s")] == [None, None, 0, 1]

    run(test)


def test_a_stop_string_is_cut_from_the_text_and_may_be_put_back() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        ids = form.tokenizer.encode("Act: x</code>")
        engine = StopEngine(ids)
        async with served(engine, form) as up:
            client, talk = up.of("s"), [{"role": "user", "content": "u"}]
            for back in ("", "</code>"):
                told = await client.chat.completions.create(
                    model="m", messages=talk[:1], stop=["zz", "</code>"], stream=True
                )
                text = "".join([c.choices[0].delta.content or "" async for c in told])
                assert text == "Act: x"
                talk = [*talk[:1], {"role": "assistant", "content": text + back}]
                await client.chat.completions.create(
                    model="m", messages=[*talk, {"role": "user", "content": "v"}]
                )
            turns = await up.turns("s")
            assert turns[0]["output_ids"] == ids
            assert [t["parent"] is None for t in turns] == [True, False, True, False]

    run(test)


class StopEngine(FakeEngine):
    """Ends on the stop string `</code>` where one is asked for."""

    def __init__(self, ids: list[int]):
        super().__init__(lambda _: ids, chunk=4)

    async def generate(self, request: Request):
        async for chunk in super().generate(request):
            if chunk.finish is Finish.STOP and request.sampling.stop:
                object.__setattr__(chunk, "stop_text", "</code>")
            yield chunk


def test_prompts_of_ids_have_parents_too() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, "one", "two"), form) as up:
            client = up.of("s")
            prompt = [5, 6, 7]
            for _ in range(3):
                answer = await client.completions.create(
                    model="m", prompt=prompt, extra_body={"return_token_ids": True}
                )
                assert answer.choices[0].prompt_token_ids == prompt
                prompt = [*prompt, *answer.choices[0].token_ids, 9]
            await client.completions.create(model="m", prompt=prompt[:5])
            assert [t["parent"] for t in await up.turns("s")] == [None, 0, 1, None]

    run(test)


def test_marks_in_client_text_are_plain_text() -> None:
    """Private-use characters of a client are content like any other."""

    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, "\ue0000-0\ue001"), form) as up:
            talk = [{"role": "user", "content": "\ue0000\ue001"}]
            answer = await up.of("s").chat.completions.create(model="m", messages=talk)
            talk += [answer.choices[0].message.model_dump(), {"role": "user", "content": "\ue001"}]
            await up.of("s").chat.completions.create(model="m", messages=talk)
            turns = await up.turns("s")
            assert turns[1]["parent"] == 0
            text = form.tokenizer.decode(np.array(turns[1]["prompt_ids"]).tolist())
            assert text.count("\ue001") == 3

    run(test)


@pytest.mark.parametrize("n", [1, 2])
def test_each_of_replies_alike_is_continued_once(n: int) -> None:
    """One body twice, or two choices of it, and each answer is gone on from."""

    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, "Yes."), form) as up:
            client, talk = up.of("s"), [{"role": "user", "content": "k"}]
            for _ in range(2 // n):
                await client.chat.completions.create(model="m", messages=talk, n=n)
            for user in "abc":
                again = [
                    {"role": "assistant", "content": "Yes."},
                    {"role": "user", "content": user},
                ]
                await client.chat.completions.create(model="m", messages=[*talk, *again])
            *continued, last = (await up.turns("s"))[2:]
            assert [t["branch"] for t in continued] == ["continue"] * 2
            assert sorted(t["parent"] for t in continued) == [0, 1]
            assert last["branch"] == "history_edited"

    run(test)
