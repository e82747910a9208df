"""History that comes back: what was sampled is never tokenised again.

Over random conversations, templates and the ways real clients rewrite messages, the
prompt of a call begins with prompt and output of the call before, or is a branch.
"""

import itertools
import json
import random
from pathlib import Path

import pytest
from fake_engine import LOOK, FakeEngine, Served, chat_of, run, sequence, served, text_engine
from openai.types.chat import ChatCompletionMessage
from pair_tokenizer import PairTokenizer, sampled

from forge_jax.models.chat import Chat, ChatFormat, built_in
from forge_jax.types import UNSPLICED, Branch, Request, Turn

QWEN_LIKE = Path(__file__).parent.parent / "models" / "qwen_like.jinja"
SPACES = ["", " ", "\n", "\n\n", "  \t", "\u00a0"]
WORDS = ["the", "her", "é", "🦉", "<b>", "k1", "=42", "{}", "\\n", '"', "�", "{{ x }}"]


def chat(name: str) -> Chat:
    if name == "thinking":
        form = ChatFormat(template=QWEN_LIKE.read_text(), end_of_turn="<|im_end|>")
    else:
        form = built_in(name)
    return Chat(tokenizer=PairTokenizer(), format=form)


class Talk:
    """One random conversation through the gateway, played as some client would."""

    def __init__(self, up: Served, seed: int, rewrite: str, session: str = "talk"):
        self.rng = random.Random(seed)
        self.rewrite = rewrite
        self.messages: list[dict] = [{"role": "user", "content": self.words()}]
        self.client = up.of(session)

    def words(self) -> str:
        return "".join(
            self.rng.choice(SPACES) + self.rng.choice(WORDS)
            for _ in range(self.rng.randrange(1, 6))
        )

    async def turn(self) -> ChatCompletionMessage:
        answer = await self.client.chat.completions.create(
            model="tiny", messages=self.messages, tools=[LOOK]
        )
        return answer.choices[0].message

    def reply(self, message: ChatCompletionMessage) -> None:
        """Appends the assistant's message as the client keeps it, and what comes next."""
        kept = message.model_dump(exclude_none=True)
        if self.rewrite == "parsed":
            for call in kept.get("tool_calls", []):
                value = json.loads(call["function"]["arguments"])
                text = json.dumps(dict(sorted(value.items(), reverse=True)), indent=1)
                call["function"]["arguments"] = text
        elif self.rewrite == "parts":
            kept["content"] = [{"type": "text", "text": kept.get("content") or ""}]
        elif self.rewrite == "stripped":
            kept["content"] = (kept.get("content") or "").strip()
        elif self.rewrite == "dropped" and "tool_calls" in kept:
            kept["content"] = None
        elif self.rewrite == "dumped":
            kept |= {"refusal": None, "annotations": [], "name": "me"}
        self.messages.append(kept)
        for call in kept.get("tool_calls", []):
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": self.words()}
            )
        if "tool_calls" not in kept:
            self.messages.append({"role": "user", "content": self.words()})


def random_reply(rng: random.Random, form: str) -> str:
    """What a model might write, odd white space included."""
    pad = lambda: rng.choice(SPACES)  # noqa: E731
    text = "".join(pad() + rng.choice(WORDS) for _ in range(rng.randrange(4)))
    if form == "lookup":
        return rng.choice(["?", "!", ""]) + text.replace("\n", "") + "x"
    calls = [
        f'<tool_call>{pad().replace(chr(160), "")}{{"name": "look",{pad().replace(chr(160), " ")}'
        f'"arguments": {{"key": {json.dumps(rng.choice(WORDS))}, "a": 1.50,  "b" : [ ]}}}}\n'
        f"</tool_call>{pad()}"
        for _ in range(rng.randrange(3))
    ]
    return text + "".join(calls)


def engine_of(form: str, seed: int, think: bool = False) -> FakeEngine:
    rng = random.Random(seed)
    end = chat(form).stop_ids[0]

    def reply(request: Request) -> list[int]:
        text = random_reply(rng, form)
        if think:
            text = f"<think>{rng.choice(SPACES)}the reason\n\n</think>\n\n{text}"
        return [*sampled(text, rng), end]

    return FakeEngine(reply, chunk=rng.randrange(1, 40))


async def talk_through(up: Served, seed: int, rewrite: str) -> tuple[Talk, tuple[Turn, ...]]:
    """Four turns of a random conversation, and what was recorded of them."""
    session = f"talk-{seed}"
    up.gateway.open(session, seed=seed)
    talk = Talk(up, seed, rewrite, session)
    for _ in range(4):
        talk.reply(await talk.turn())
    return talk, up.gateway.close(session)


def extends(after: Turn, before: Turn) -> bool:
    begin = sequence(before)
    return after.prompt[: len(begin)].tolist() == begin


@pytest.mark.parametrize("rewrite", ["kept", "parsed", "parts", "stripped", "dropped", "dumped"])
@pytest.mark.parametrize("form", ["chatml", "lookup"])
def test_every_call_extends_the_one_before(form: str, rewrite: str) -> None:
    async def test() -> None:
        async with served(engine_of(form, 0), chat(form)) as up:
            for seed in range(10):
                _, turns = await talk_through(up, seed, rewrite)
                assert [turn.parent for turn in turns] == [None, 0, 1, 2]
                assert [t.lineage.branch for t in turns] == [Branch.ROOT, *[Branch.CONTINUE] * 3]
                for before, after in itertools.pairwise(turns):
                    assert extends(after, before)
                    gained = after.lineage.spliced_tokens - before.lineage.spliced_tokens
                    assert gained == len(before.output)
                    assert not after.lineage.replies.keys() & {*UNSPLICED}
                    # No turn is closed twice, by the model and by the template.
                    text = up.gateway._core.chat.tokenizer.decode(after.prompt.tolist())
                    assert "<|im_end|><|im_end|>" not in text

    run(test)


def test_a_template_that_drops_reasoning_is_respected() -> None:
    form = chat("thinking")

    async def test() -> None:
        async with served(engine_of("thinking", 0, think=True), form) as up:
            for seed in range(10):
                talk, turns = await talk_through(up, seed, "kept")
                replies = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant"]
                for k in range(1, 4):
                    # The reasoning of the reply before is gone once a user speaks after it.
                    kept = talk.messages[replies[k] - 1]["role"] == "tool"
                    assert extends(turns[k], turns[k - 1]) == kept
                    assert turns[k].parent == (k - 1 if kept else None)
                    branch = turns[k].lineage.branch
                    assert branch is (Branch.CONTINUE if kept else Branch.RERENDERED)
                    assert (turns[k].lineage.redone == 0) == kept
                    text = form.tokenizer.decode(turns[k].prompt.tolist())
                    assert kept or "<think>" not in text

    run(test)


def test_reasoning_survives_where_the_template_keeps_it() -> None:
    async def test() -> None:
        async with served(engine_of("chatml", 1, think=True), chat("chatml")) as up:
            _, turns = await talk_through(up, 0, "kept")
            assert [turn.parent for turn in turns] == [None, 0, 1, 2]

    run(test)


@pytest.mark.parametrize("edit", ["text", "arguments", "name", "user", "dropped turn"])
def test_an_edited_history_is_a_branch(edit: str) -> None:
    call = 'Look.<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'

    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, call, "Then.", "End."), form) as up:
            talk = Talk(up, 0, "kept")
            talk.reply(await talk.turn())
            talk.reply(await talk.turn())
            first = talk.messages[1]
            if edit == "text":
                first["content"] = "Looked."
            elif edit == "arguments":
                first["tool_calls"][0]["function"]["arguments"] = '{"key": "b"}'
            elif edit == "name":
                first["tool_calls"][0]["function"]["name"] = "see"
            elif edit == "user":
                talk.messages[0]["content"] += "!"
            else:
                del talk.messages[1:3]
            await talk.turn()
            turns = await up.turns("talk")
            assert [t["parent"] for t in turns] == [None, 0, None]
            # Replies that were not touched are the sampled ids all the same.
            if edit == "user":
                prompt, output = turns[2]["prompt_ids"], turns[0]["output_ids"]
                assert any(prompt[i : i + len(output)] == output for i in range(len(prompt)))

    run(test)


def test_a_reply_cut_by_its_limit_is_continued_token_by_token() -> None:
    async def test() -> None:
        form = chat("chatml")
        async with served(text_engine(form, "the other", "end"), form) as up:
            talk = Talk(up, 0, "kept")
            cut = await up.of("talk").chat.completions.create(
                model="m", messages=talk.messages, max_tokens=3
            )
            assert cut.choices[0].finish_reason == "length"
            talk.reply(cut.choices[0].message)
            await talk.turn()
            turns = await up.turns("talk")
            assert turns[1]["parent"] is None  # the tools were not offered before
            output = turns[0]["output_ids"]
            assert len(output) == 3
            prompt = turns[1]["prompt_ids"]
            at = next(i for i in range(len(prompt)) if prompt[i : i + 3] == output)
            assert prompt[at + 3] == form.stop_ids[0]  # the template closes the turn

    run(test)


@pytest.mark.parametrize(("said", "spliced"), [("", 0), ("One.", 1), ("Other.", 0)])
def test_a_message_is_known_by_its_id_unless_its_text_differs(said: str, spliced: int) -> None:
    async def test() -> None:
        async with served(text_engine(chat("chatml"), "One."), chat("chatml")) as up:
            question = {"role": "user", "content": "x"}
            create = up.of("s").responses.create
            (item,) = (await create(model="m", input=[question])).output
            parts = [{"type": "output_text", "text": said}] if said else []
            await create(model="m", input=[question, {**item.to_dict(), "content": parts}])
            parents = [t["parent"] for t in await up.turns("s")]
            assert parents == [None, 0 if spliced else None]
            assert (
                f'forge_replies_total{{rule="foreign"}} {1 - spliced}'
                in (await up.http.get("/metrics")).text
            )

    run(test)
