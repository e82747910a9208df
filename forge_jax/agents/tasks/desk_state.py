"""The records of `desk`, and the tools that read and change them.

Calls flow in, texts flow out. A call that cannot be done says why and changes nothing; any other
does what it says, whether or not it was wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Tool

OPEN, SENT, CANCELLED = "open", "sent", "cancelled"
TYPES: Mapping[str, type] = {"string": str, "integer": int}


@dataclass(kw_only=True)
class Order:
    """One order of a customer."""

    customer: str
    item: str
    price: int
    city: str
    status: str = OPEN


@dataclass
class State:
    """All records of the shop."""

    orders: dict[int, Order]  # by number
    credit: dict[str, int] = field(default_factory=dict)  # of customers who have any
    tickets: list[int] = field(default_factory=list)  # orders that somebody has to look into

    def find_orders(self, customer: str) -> str:
        found = [(n, o) for n, o in self.orders.items() if o.customer == customer]
        lines = [f"{n} {o.item} {o.price} {o.status}" for n, o in found]
        return "; ".join(lines) or f"no orders of {customer}"

    def cancel_order(self, order: int) -> str:
        if problem := self._closed(order):
            return problem
        self.orders[order].status = CANCELLED
        return "ok"

    def redirect_order(self, order: int, city: str) -> str:
        if problem := self._closed(order):
            return problem
        self.orders[order].city = city
        return "ok"

    def credit_customer(self, customer: str, amount: int) -> str:
        if customer not in {order.customer for order in self.orders.values()}:
            return f"no customer {customer}"
        if amount < 1:
            return f"amount {amount} is not above 0"
        self.credit[customer] = self.credit.get(customer, 0) + amount
        return "ok"

    def open_ticket(self, order: int) -> str:
        if order not in self.orders:
            return f"no order {order}"
        self.tickets = sorted([*self.tickets, order])
        return "ok"

    def _closed(self, order: int) -> str:
        """Why an order cannot be changed any more; "" if it can."""
        if order not in self.orders:
            return f"no order {order}"
        status = self.orders[order].status
        return "" if status == OPEN else f"order {order} is {status}"


def _tool(name: str, description: str, **parameters: str) -> Tool:
    """A tool all of whose parameters are required; `parameters`: their JSON types."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS: Sequence[Tool] = (
    _tool(
        "find_orders",
        "Lists the orders of a customer: number, item, price and status (open, sent, cancelled).",
        customer="string",
    ),
    _tool("cancel_order", "Cancels an open order for good.", order="integer"),
    _tool("redirect_order", "Sends an open order to another city.", order="integer", city="string"),
    _tool("credit_customer", "Pays an amount to a customer.", customer="string", amount="integer"),
    _tool("open_ticket", "Has somebody look into an order.", order="integer"),
)


def use(state: State, name: str, arguments: Mapping[str, Any]) -> str:
    """The result of a tool. Raises BadCall unless there is such a tool and it takes these."""
    named = [tool["function"] for tool in TOOLS if tool["function"]["name"] == name]
    if not named:
        known = ", ".join(tool["function"]["name"] for tool in TOOLS)
        raise BadCall(f"no tool {name}; there are {known}")
    kinds = {key: one["type"] for key, one in named[0]["parameters"]["properties"].items()}
    # A bool is an int to Python and none to JSON.
    fits = arguments.keys() == kinds.keys() and all(
        type(arguments[key]) is TYPES[kind] for key, kind in kinds.items()
    )
    if not fits:
        wanted = ", ".join(f"{key} ({kind})" for key, kind in kinds.items())
        raise BadCall(f"{name} takes {wanted}")
    done: str = getattr(state, name)(**arguments)
    return done
