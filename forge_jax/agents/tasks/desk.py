"""desk: do what a customer wants with the tools of a shop, judged by what the records are then.

A seed makes orders of a few customers and wishes about them. The model has to find the orders
meant and change them; its tools are those of `desk_state`:

    Cancel Ann's cup.
    ?find_orders Ann      =41 pen 3 open; 57 cup 7 open
    ?cancel_order 57      =ok
    done

The reward is 1 if and only if, once the model replies without a call, the records are what the
wishes make of them: no order, payment or ticket more or less. Which calls led there does not
matter; what is done by mistake stays done. Levels are rows of LEVELS: customers, orders of each,
wishes, and whether orders may be sent already, which then asks for a ticket in place of what was
wished.

Held-out records with their wishes are never trained on, though their customers and items are.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from forge_jax.agents.context import Context
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.split import content_of, draw_from, level_of
from forge_jax.agents.tasks.desk_state import OPEN, SENT, TOOLS, Order, State, use
from forge_jax.agents.white_box import ToolLoop, tool_message
from forge_jax.types import Task

MAX_TURNS = 12
MAX_TOKENS = 40  # of one reply
CUSTOMERS = ("Ann", "Bob", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
ITEMS = ("cup", "pen", "hat", "bag", "map", "key", "fan", "box", "rug", "jar")
CITIES = ("Metz", "Nara", "Oslo", "Pisa", "Vigo", "York")  # of other initials than customers
CANCEL, REDIRECT, REFUND = "cancel", "redirect", "refund"


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much there is to do."""

    customers: int
    orders: int  # of each
    wishes: int
    sent: bool = False  # orders may be sent already


LEVELS = (
    Level(customers=2, orders=1, wishes=1),
    Level(customers=3, orders=3, wishes=2),
    Level(customers=5, orders=4, wishes=3, sent=True),
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often the script errs; the default wins about 0.6 of its level 0 episodes."""

    lazy: float = 0.38  # leaves a wish undone; a wrong order would teach to misread


NOISE = Noise()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to happen to an order."""

    kind: str  # CANCEL | REDIRECT | REFUND
    order: int
    city: str = ""  # where to, of REDIRECT

    def step(self, orders: Mapping[int, Order]) -> tuple[str, dict[str, Any]]:
        """The call that does it."""
        order = orders[self.order]
        if self.kind == REFUND:
            return "credit_customer", {"customer": order.customer, "amount": order.price}
        if order.status != OPEN:
            return "open_ticket", {"order": self.order}
        if self.kind == CANCEL:
            return "cancel_order", {"order": self.order}
        return "redirect_order", {"order": self.order, "city": self.city}

    def told(self, orders: Mapping[int, Order]) -> str:
        order = orders[self.order]
        to = f" to {self.city}" if self.city else ""
        verb = {CANCEL: "Cancel", REDIRECT: "Send", REFUND: "Refund"}[self.kind]
        return f"{verb} {order.customer}'s {order.item}{to}."


@dataclass(frozen=True)
class Desk:
    """The world of one content: records that calls change."""

    content: str  # JSON: orders by number, wishes, what to do about orders that are sent
    state: State = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", self.begun())

    def begun(self) -> State:
        """The records before any call."""
        orders = json.loads(self.content)["orders"]
        return State({int(number): Order(**order) for number, order in orders.items()})

    @property
    def wishes(self) -> tuple[Wish, ...]:
        return tuple(Wish(**wish) for wish in json.loads(self.content)["wishes"])

    @property
    def wanted(self) -> State:
        """The records once every wish has been met."""
        state = self.begun()
        for wish in self.wishes:
            use(state, *wish.step(state.orders))
        return state

    @property
    def messages(self) -> tuple[Message, ...]:
        orders = self.begun().orders
        told = [wish.told(orders) for wish in self.wishes]
        if json.loads(self.content)["sent"]:
            told.append("Where an order to change is sent, open a ticket instead.")
        return ({"role": "user", "content": " ".join(told)},)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(TOOLS)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises BadCall unless it is one of the tools with arguments of its schema."""
        return use(self.state, name, arguments)

    async def score(self, answer: str) -> float:
        """Of what was done; the answer itself does not count."""
        return float(self.state == self.wanted)


def draw(rng: np.random.Generator, level: int = 0) -> str:
    """Random records of a level, with wishes about orders of different customers."""
    row = LEVELS[level]
    numbers = iter(rng.permutation(np.arange(10, 100)))
    customers = [str(c) for c in rng.permutation(CUSTOMERS)[: row.customers]]
    orders: dict[int, Order] = {}
    for customer in customers:
        for item in rng.permutation(ITEMS)[: row.orders]:
            orders[int(next(numbers))] = Order(
                customer=customer,
                item=str(item),
                price=int(rng.integers(1, 10)),
                city=str(rng.choice(CITIES)),
                status=SENT if row.sent and rng.random() < 0.4 else OPEN,
            )
    wishes = []
    for customer in customers[: row.wishes]:
        kind = str(rng.choice([CANCEL, REDIRECT, REFUND]))
        order = int(rng.choice([n for n, o in orders.items() if o.customer == customer]))
        others = [city for city in CITIES if city != orders[order].city]
        city = str(rng.choice(others)) if kind == REDIRECT else ""
        wishes.append(Wish(kind=kind, order=order, city=city))
    # Nobody is told in the order in which customers were drawn.
    listed = {int(n): asdict(orders[int(n)]) for n in rng.permutation(list(orders))}
    made = {"orders": listed, "wishes": [asdict(wish) for wish in wishes], "sent": row.sent}
    return json.dumps(made)


def world_of(task: Task) -> Desk:
    """The world that a task's family, split, seed and level make."""
    return Desk(content_of(task, partial(draw, level=level_of(task, len(LEVELS)))))


def agent() -> ToolLoop:
    """An agent for tasks of this family."""
    return ToolLoop(start=world_of, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)


def play(
    rng: np.random.Generator, noise: Noise = NOISE, level: int = 0
) -> tuple[ScriptedCall, ...]:
    """The calls of a scripted episode on random training records."""
    return script(Desk(draw_from("train", partial(draw, level=level), rng)), rng, noise)


def script(world: Desk, rng: np.random.Generator, noise: Noise) -> tuple[ScriptedCall, ...]:
    """Finds the order of every wish and does what is wished, erring as `noise` says."""
    state, context = world.begun(), Context().append(*world.messages)
    calls: list[ScriptedCall] = []

    def act(name: str, arguments: Mapping[str, Any]) -> None:
        nonlocal context
        function = {"name": name, "arguments": json.dumps(arguments)}
        called = f"call_{len(calls)}"
        asked = {"id": called, "type": "function", "function": function}
        reply: Message = {"role": "assistant", "tool_calls": [asked]}
        calls.append(ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
        context = context.append(reply, tool_message(called, use(state, name, arguments)))

    for wish in world.wishes:
        customer = state.orders[wish.order].customer
        act("find_orders", {"customer": customer})
        if rng.random() >= noise.lazy:
            act(*wish.step(state.orders))
    reply: Message = {"role": "assistant", "content": "done"}
    return (*calls, ScriptedCall(messages=context.messages, tools=world.tools, reply=reply))
