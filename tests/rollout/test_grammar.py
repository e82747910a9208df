"""Laws of grammars: what is drawn of the tokens they allow is, in the end, in the language."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_jax.models.tokenizer import ByteTokenizer, JsonTokenizer
from forge_jax.rollout.grammar import Grammars, Matcher
from forge_jax.types import Grammar, Refused

MOST = 400  # tokens of a text
BYTES = Grammars(ByteTokenizer(), 264, (258,))
TEXT = [
    'a tool call: {"name": "look", "arguments": {"key": "value", "count": 12.5, "on": true}}',
    'a list: [1, 2, 3, null, false, "red", "green", "blue"] and more of the same, naïve 日本 🙂',
] * 20


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a byte-level BPE tokenizer, which has tokens across the parts of a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    return grammars_of(made, tmp_path_factory.mktemp("bpe"), 1)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a tokenizer as Llama 2's, which puts a space before the first word."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    vocab |= {c: 257 + i for i, c in enumerate(["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "▁n"])}
    merges = [("h", "e"), ("▁", "n")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["</s>"])
    return grammars_of(made, tmp_path_factory.mktemp("words"), made.token_to_id("</s>"))


def grammars_of(made: Tokenizer, folder: Path, end: int) -> Grammars:
    made.save(str(folder / "tokenizer.json"))
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    return Grammars(tokenizer, tokenizer.vocab_size + 700, (end,))


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def written(grammars: Grammars, grammar: Grammar, rng: random.Random, ahead: int = 1) -> str | None:
    """A text drawn evenly of what may come, None if it does not end in time."""
    matcher, out = grammars.matcher(grammar), []
    while len(out) < MOST:
        assert matcher.advance(np.array(out, np.int32), ahead) is None
        out += matcher.forced
        choice = rng.choice(allowed(matcher))
        if choice in grammars._stop_ids:
            return grammars._tokenizer.decode(out)
        out.append(choice)
    return None


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """One whose texts are short."""
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const"]
    kind = rng.choice(kinds if depth == 0 else [*kinds, "object", "array", "anyOf", "$ref"])
    if kind == "object":
        names = rng.sample(["a", "bc", "naïve", 'q"', "d e", "f"], rng.randrange(4))
        properties = {name: schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": False,
        }  # fmt: skip
    if kind == "array":
        low = rng.randrange(2)
        items = schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth - 1), schema(rng, depth - 1)]}
    simple = {
        "$ref": {"$ref": "#/$defs/point"},
        "enum": {"enum": ["red", 3, None, "gr\u00fcn", [1]]},
        "const": {"const": {"x": [1, "y"]}},
        "string": {"type": "string", "maxLength": rng.randrange(1, 6)},
        "integer": {"type": "integer", "minimum": -40, "maximum": rng.randrange(99)},
        "number": {"type": "number", "minimum": 0, "maximum": 1},
    }
    return simple.get(kind, {"type": kind})


def whole(seed: int) -> dict[str, Any]:
    point = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    return {**schema(random.Random(seed), 3), "$defs": {"point": point}}


@pytest.mark.parametrize("seed", range(40))
def test_json_is_valid_under_its_schema(seed: int, pairs: Grammars, words: Grammars) -> None:
    wanted = whole(seed)
    grammar = Grammar(kind="json", text=json.dumps(wanted))
    for grammars in (BYTES, pairs, words):
        texts = [written(grammars, grammar, random.Random(seed), ahead) for ahead in (1, 4)]
        for text in texts:
            if text is not None:
                jsonschema.validate(json.loads(text), wanted)
        assert texts != [None, None]


def test_any_object_has_bounded_white_space() -> None:
    grammar = Grammar(kind="json", text='{"type": "object"}')
    texts = [written(BYTES, grammar, random.Random(seed)) for seed in range(30)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 3
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert not any(re.search(r"\s{18}", text) for text in ended)


@pytest.mark.parametrize("regex", [r"[a-c]{2,5}x?", r"\d{4}-\d\d", r"(yes|no|né)+!", r"^ab*$"])
def test_texts_match_a_regular_expression_whole(regex: str, pairs: Grammars) -> None:
    for seed, grammars in enumerate([BYTES, pairs] * 5):
        text = written(grammars, Grammar(kind="regex", text=regex), random.Random(seed))
        assert text is not None
        assert re.fullmatch(regex, text)


def test_every_choice_comes_and_nothing_else(pairs: Grammars, words: Grammars) -> None:
    choices = ["yes", "yes and no", 'a "quoted"\n\\ one', "日本 🙂", "<|im_end|></s>"]
    grammar = Grammar(kind="choice", text=json.dumps(choices))
    for grammars in (BYTES, pairs, words):
        texts = {written(grammars, grammar, random.Random(seed)) for seed in range(300)}
        assert texts == set(choices)


SUM = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n'
GBNF = 'root ::= digit digit? ("+" digit digit?)*\ndigit ::= [0-9]'


@pytest.mark.parametrize("rules", [SUM, GBNF], ids=["lark", "gbnf"])
def test_rules_are_followed(rules: str, pairs: Grammars) -> None:
    for seed, grammars in enumerate([BYTES, pairs] * 5):
        text = written(grammars, Grammar(kind="grammar", text=rules), random.Random(seed))
        assert text is not None
        assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text)


def test_tokens_that_stand_for_no_text_never_come(pairs: Grammars) -> None:
    for grammars in (BYTES, pairs):
        matcher = grammars.matcher(Grammar(kind="regex", text=r"(.|\n)*"))
        assert matcher.advance(np.zeros(0, np.int32), 1) is None
        named, ids = grammars._tokenizer, allowed(matcher)
        assert set(ids) & named.control_ids == set(grammars._stop_ids)
        assert max(ids) < named.vocab_size
        assert len(ids) > 120


def test_what_is_forced_is_what_one_step_at_a_time_allows(pairs: Grammars) -> None:
    grammar = Grammar(kind="regex", text='"name": "look", or (yes|no) and more')
    far, near = (pairs.matcher(grammar) for _ in range(2))
    out: list[int] = []
    assert far.advance(np.zeros(0, np.int32), 50) is None
    assert 1 < len(far.forced) < 50
    for token in far.forced:
        assert near.advance(np.array(out, np.int32), 1) is None
        assert near.forced == []
        assert allowed(near) == [token]
        out.append(token)
    assert near.advance(np.array(out, np.int32), 1) is None
    assert allowed(near) == allowed(far)
    again = pairs.matcher(grammar)  # of a sequence that is computed again
    assert again.advance(np.array(out, np.int32), 1) is None
    assert allowed(again) == allowed(far)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json", '{"type": "object", "if": {}}', "if"),
        ("json", '{"type": "thing"}', "thing"),
        ("json", '{"type": "string", "minLength": 2, "maxLength": 1}', "minLength"),
        ("json", '{"$ref": "http://elsewhere/x"}', "elsewhere"),
        ("json", "[1]", "object schema"),
        ("json", "{", ""),
        ("json", '{"items": ' * 200 + "{}" + "}" * 200, "recursion"),
        ("regex", "(a", "unclosed"),
        ("regex", "a(?=b)", "look-ahead"),
        ("grammar", "start: nobody", "nobody"),
        ("grammar", "root ::= (", ""),
        ("choice", '["\\ud800"]', ""),
    ],
)
def test_what_is_no_grammar_is_refused(kind: str, text: str, said: str) -> None:
    with pytest.raises(Refused, match=f"(?s)guided: .*{said}") as refused:
        BYTES.matcher(Grammar(kind=kind, text=text, source="guided"))
    assert refused.value.status == 400
    assert len(str(refused.value)) < 600


def test_a_model_that_cannot_end_a_text_has_no_grammar() -> None:
    with pytest.raises(Refused, match="stop id"):
        Grammars(ByteTokenizer(), 264, ()).matcher(Grammar(kind="regex", text="a"))


def test_a_text_that_no_token_can_write_ends_the_completion() -> None:
    stopped = Grammars(ByteTokenizer(), 264, (ord("\n"),))
    matcher = stopped.matcher(Grammar(kind="regex", text="a\nb"))
    assert matcher.advance(np.zeros(0, np.int32), 1) is None
    assert matcher.advance(np.array([ord("a")], np.int32), 1) is not None
