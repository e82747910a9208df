"""desk: the records at the end decide, wrong calls have effects, schemas are real."""

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from forge_jax.agents.faults import BadCall
from forge_jax.agents.split import draw_from, held_out
from forge_jax.agents.tasks import desk
from forge_jax.agents.tasks.desk_state import TOOLS, Order, State, use

PERFECT = desk.Noise(lazy=0.0)


def content(wish: dict[str, Any]) -> str:
    orders = {
        "41": Order(customer="Ann", item="pen", price=3, city="Oslo"),
        "57": Order(customer="Ann", item="cup", price=7, city="Rome"),
        "60": Order(customer="Bob", item="cup", price=2, city="Rome", status="sent"),
    }
    made = {"orders": {n: vars(o) for n, o in orders.items()}, "wishes": [wish], "sent": False}
    return json.dumps(made)


def world() -> desk.Desk:
    return desk.Desk(content({"kind": "cancel", "order": 57, "city": ""}))


def after(*calls: tuple[str, dict[str, Any]]) -> float:
    async def play() -> float:
        made = world()
        for name, arguments in calls:
            await made.call(name, arguments)
        return await made.score("done")

    return asyncio.run(play())


CANCEL = ("cancel_order", {"order": 57})


def test_any_calls_that_lead_to_the_wanted_records_win() -> None:
    assert world().messages[0]["content"] == "Cancel Ann's cup."
    assert after(CANCEL) == 1
    assert after(("find_orders", {"customer": "Bob"}), CANCEL, CANCEL) == 1
    assert after(("redirect_order", {"order": 60, "city": "Lima"}), CANCEL) == 1  # was refused


@pytest.mark.parametrize(
    "extra",
    [
        ("cancel_order", {"order": 41}),
        ("redirect_order", {"order": 41, "city": "Lima"}),
        ("credit_customer", {"customer": "Ann", "amount": 7}),
        ("open_ticket", {"order": 57}),
    ],
)
def test_what_nobody_wished_for_is_not_forgiven(extra: tuple[str, dict[str, Any]]) -> None:
    assert after() == after(extra) == after(extra, CANCEL) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("find_orders", {"customer": "Ann"}, "41 pen 3 open; 57 cup 7 open"),
        ("find_orders", {"customer": "Zoe"}, "no orders of Zoe"),
        ("cancel_order", {"order": 60}, "order 60 is sent"),
        ("cancel_order", {"order": 99}, "no order 99"),
        ("redirect_order", {"order": 60, "city": "Rome"}, "order 60 is sent"),
        ("open_ticket", {"order": 99}, "no order 99"),
        ("credit_customer", {"customer": "Zoe", "amount": 1}, "no customer Zoe"),
        ("credit_customer", {"customer": "Ann", "amount": 0}, "amount 0 is not above 0"),
    ],
)
def test_errors_are_told_and_change_nothing(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    state = world().begun()
    assert use(state, name, arguments) == said
    assert state == world().begun()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("delete", {}),
        ("_closed", {"order": 41}),
        ("cancel_order", {}),
        ("cancel_order", {"order": "41"}),
        ("cancel_order", {"order": True}),
        ("cancel_order", {"order": 41, "why": "late"}),
        ("find_orders", {"customer": 41}),
    ],
)
def test_calls_that_no_schema_has_are_bad_and_change_nothing(
    name: str, arguments: dict[str, Any]
) -> None:
    state = world().begun()
    with pytest.raises(BadCall):
        use(state, name, arguments)
    assert state == world().begun()


def test_schemas_are_valid_and_take_what_the_script_sends() -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    used = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        for call in desk.play(rng, desk.NOISE, seed % len(desk.LEVELS)):
            for asked in call.reply.get("tool_calls", ()):
                function = asked["function"]
                jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
                used.add(function["name"])
    assert used == set(schemas)


@pytest.mark.parametrize("level", range(len(desk.LEVELS)))
def test_a_faultless_script_wins_and_idling_never_does(level: int) -> None:
    rng, row = np.random.default_rng(level), desk.LEVELS[level]
    for _ in range(40):
        made = desk.Desk(draw_from("train", lambda r: desk.draw(r, level), rng))
        assert not held_out(made.content)
        assert len(made.begun().orders) == row.customers * row.orders
        assert asyncio.run(made.score("done")) == 0
        calls = desk.script(made, rng, PERFECT)
        assert len(calls) == 2 * row.wishes + 1 <= desk.MAX_TURNS
        state = made.begun()
        for asked in (one for call in calls for one in call.reply.get("tool_calls", ())):
            use(state, asked["function"]["name"], json.loads(asked["function"]["arguments"]))
        assert state == made.wanted


def test_two_episodes_of_a_world_do_not_share_records() -> None:
    one, two = world(), world()
    use(one.state, *CANCEL)
    assert two.state == two.begun() == State(one.begun().orders)
