"""calc: one operation a call, any other call is told what is wrong, the value alone pays."""

import asyncio

import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.split import draw_from
from forge_jax.agents.tasks import calc

PERFECT = calc.Noise(early=0.0, wrong=0.0)


def test_calc_is_written_as_one_operation_after_another() -> None:
    calls = calc.script(calc.Calc("5+7*8"), np.random.default_rng(0), PERFECT)
    said = [call.reply.get("content") or call.reply["tool_calls"][0]["function"] for call in calls]
    assert [one["arguments"] for one in said[:-1]] == [
        '{"expression": "7*8"}',
        '{"expression": "5+56"}',
    ]
    assert said[-1] == "!61"


@pytest.mark.parametrize("level", range(len(calc.LEVELS)))
def test_values_are_those_of_arithmetic(level: int) -> None:
    rng = np.random.default_rng(level)
    for _ in range(40):
        world = calc.Calc(draw_from("train", lambda r: calc.draw(r, level), rng))
        right = eval(world.expression)  # the oracle; the package never evaluates text
        assert world.value == right
        calls = calc.script(world, rng, PERFECT)
        assert len(calls) == calc.LEVELS[level][0] + 1 <= calc.MAX_TURNS
        assert calls[-1].reply["content"] == f"!{right}"
        assert asyncio.run(world.score(f"!{right}")) == 1
        for wrong in (f"{right}", f"!{right + 1}", f"! {right}", "!", "", f"!{world.expression}"):
            assert asyncio.run(world.score(wrong)) == 0


@pytest.mark.parametrize(
    "expression",
    ["", "7", "7*", "7*8+5", "7/8", "7**8", "a+b", "__import__('os')", "9" * 13 + "+1", "7*8\n+1"],
)
def test_what_is_not_one_operation_is_a_bad_call(expression: str) -> None:
    with pytest.raises(BadCall):
        asyncio.run(calc.Calc("1+1+1").call("calculate", {"expression": expression}))


@pytest.mark.parametrize(("name", "arguments"), [("sum", {"expression": "1+1"}), ("calculate", {})])
def test_another_tool_or_no_text_is_a_bad_call(name: str, arguments: dict[str, str]) -> None:
    with pytest.raises(BadCall, match="calculate"):
        asyncio.run(calc.Calc("1+1+1").call(name, arguments))


def test_operations_on_numbers_of_either_sign() -> None:
    for expression in ("-30 + 7", "5--3", "0*-4"):
        assert calc.calculated(expression) == str(eval(expression))
