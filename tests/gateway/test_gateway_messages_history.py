"""Histories of the Messages protocol, written back as clients write them."""

import itertools
import json
import random

import pytest
from anthropic.types import Message
from fake_engine import FakeEngine, run, sequence
from pair_tokenizer import PairTokenizer, sampled
from test_gateway_messages import LOOK, USER, official, say

from forge_jax.models.chat import Chat, built_in
from forge_jax.types import Request, Turn

ASK = {"model": "any", "max_tokens": 4096, "messages": USER}
MARK = {"type": "ephemeral"}
SPACES = ["", " ", "\n", "\n\n", "  \t"]
WORDS = ["the", "her", "é", "🦉", "<b>", "k1", "{}", '"']


class Talk:
    """A random conversation, its history written back as some client would."""

    def __init__(self, seed: int, rewrite: str):
        self.rng = random.Random(seed)
        self.rewrite = rewrite
        self.messages: list[dict] = [{"role": "user", "content": self.words()}]

    def words(self) -> str:
        count = self.rng.randrange(1, 6)
        return "".join(self.rng.choice(SPACES) + self.rng.choice(WORDS) for _ in range(count))

    def marked(self) -> list[dict]:
        """The messages with the cache mark on the newest block alone."""
        if self.rewrite != "marked":
            return self.messages
        last = self.messages[-1]
        blocks = last["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        blocks = [*blocks[:-1], {**blocks[-1], "cache_control": MARK}]
        return [*self.messages[:-1], {**last, "content": blocks}]

    def reply(self, message: Message) -> None:
        kept = message.model_dump(exclude_none=True)["content"]
        calls = [block for block in kept if block["type"] == "tool_use"]
        if self.rewrite == "reordered":
            for call in calls:
                call["input"] = dict(sorted(call["input"].items(), reverse=True))
        elif self.rewrite == "dropped" and calls:
            kept = calls
        elif self.rewrite == "thinking":
            kept = [{"type": "thinking", "thinking": "hm", "signature": "x"}, *kept]
        elif self.rewrite == "text" and not calls:
            kept = "".join(block["text"] for block in kept)
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": self.words()}
            for call in calls
        ]
        said = results or [{"type": "text", "text": self.words()}]
        self.messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": said}]


def random_engine(chat: Chat, seed: int) -> FakeEngine:
    rng = random.Random(seed)

    def reply(request: Request) -> list[int]:
        text = "".join(rng.choice(SPACES) + rng.choice(WORDS) for _ in range(rng.randrange(4)))
        for _ in range(rng.randrange(3)):
            value = json.dumps({"key": rng.choice(WORDS), "a": 1.50, "b": []}, indent=1)
            text += f'<tool_call>{{"name": "look", "arguments": {value}}}</tool_call>'
            text += rng.choice(["", " \n", " and"])
        return [*sampled(text, rng), chat.stop_ids[0]]

    return FakeEngine(reply, chunk=rng.randrange(1, 40))


def extends(after: Turn, before: Turn) -> bool:
    begin = sequence(before)
    return after.prompt[: len(begin)].tolist() == begin


REWRITES = ["kept", "marked", "reordered", "dropped", "thinking", "text"]


@pytest.mark.parametrize("rewrite", REWRITES)
def test_every_call_extends_the_one_before(rewrite: str) -> None:
    async def test() -> None:
        chat = Chat(tokenizer=PairTokenizer(), format=built_in("chatml"))
        async with official(random_engine(chat, 0), chat) as (up, client):
            for seed in range(6):
                up.gateway.open(f"talk-{seed}", seed=seed)
                one = client.with_options(base_url=f"{up.url}/s/talk-{seed}")
                talk = Talk(seed, rewrite)
                for turn in range(4):
                    way = ("whole", "streamed")[turn % 2]
                    line = f"x-anthropic-billing-header: cc_version=2; cch={turn};"
                    system = [{"type": "text", "text": t} for t in (line, "Be brief.")]
                    ask = {**ASK, "messages": talk.marked(), "tools": [LOOK], "system": system}
                    talk.reply(await say(one, way, **ask))
                turns = up.gateway.close(f"talk-{seed}")
                assert [turn.parent for turn in turns] == [None, 0, 1, 2]
                assert all(extends(b, a) for a, b in itertools.pairwise(turns))

    run(test)
