"""All sessions of a gateway, by name; the memory of those nobody declared is bounded.

Names flow in, sessions flow out. A declared session keeps every call until it is
closed. Undeclared ones come into being with their first call, and their oldest calls
are forgotten when together they hold more than `keep_tokens`.
"""

import secrets
from collections import deque

from forge_jax.config import BudgetConfig
from forge_jax.gateway.call import Call
from forge_jax.gateway.session import Session
from forge_jax.models.chat import Chat
from forge_jax.types import Turn

CALL_TOKENS = 256  # what a call itself counts for, in tokens


class Sessions:
    """The table of sessions."""

    def __init__(self, chat: Chat, keep_tokens: int, budget: BudgetConfig):
        """`budget` is that of each session opened without one of its own."""
        self._chat = chat
        self._budget = budget
        self._keep_tokens = keep_tokens
        self._table: dict[str, Session] = {}
        self._kept: deque[tuple[Session, Call, int]] = deque()  # undeclared, oldest first
        self._tokens = 0  # of those

    def __len__(self) -> int:
        return len(self._table)

    def open(
        self,
        name: str,
        seed: int | None,
        temperature: float | None,
        ids: str | None,
        budget: BudgetConfig | None,
    ) -> None:
        """Declares a session. Raises ValueError if one of that name is declared already.

        An undeclared session of that name ends: it is somebody else's.
        """
        known = self._table.get(name)
        if known is not None:
            if known.declared:
                raise ValueError(f"session={name!r} is already open")
            known.close()
        self._table[name] = Session(
            name,
            self._chat,
            self._budget if budget is None else budget,
            seed=seed,
            temperature=temperature,
            ids=ids,
            declared=True,
        )

    def close(self, name: str) -> tuple[Turn, ...]:
        """Ends a session and forgets it; gives its turns. Raises KeyError if there is none."""
        return self._table.pop(name).close()

    def __getitem__(self, name: str) -> Session:
        return self._table[name]

    def get(self, name: str) -> Session | None:
        """The session of that name, if there is one."""
        return self._table.get(name)

    def of(self, name: str | None, create: bool) -> Session | None:
        """The session a call belongs to; None if it is not declared and may not be created.

        A new one enters the table with its first call; one without a name never does.
        """
        if name is None:
            name = f"anonymous-{secrets.token_hex(8)}"
            return Session(name, self._chat, self._budget, anonymous=True)
        session = self._table.get(name)
        if session is None and create:
            # Ids of one that was forgotten may come back, and are to name nothing of this.
            ids = f"{name}/{secrets.token_hex(8)}"
            session = Session(name, self._chat, self._budget, ids=ids)
        return session

    def begin(self, session: Session, call: Call) -> None:
        """A call of `session` is about to be drawn."""
        session.begin(call)
        if not session.anonymous:
            self._table.setdefault(session.name, session)

    def ended(self, session: Session, call: Call) -> None:
        """A call of `session` ended: forgets the oldest undeclared calls beyond the bound."""
        if session.declared or self._table.get(session.name) is not session:
            return
        size = call.tokens + CALL_TOKENS
        self._kept.append((session, call, size))
        self._tokens += size
        while self._tokens > self._keep_tokens:
            oldest, forgotten, size = self._kept.popleft()
            self._tokens -= size
            oldest.forget(forgotten)
            if not oldest.calls and self._table.get(oldest.name) is oldest:
                del self._table[oldest.name]
