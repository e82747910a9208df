"""Drafts from what was said before: by the request itself, and by others of the same prompt.

Every slot has a row of known tokens, earlier completions of the prompt first and its own
sequence last; the place where the row's end occurred before, with most tokens in common, is
looked up on the device, and what followed there is the draft. Nothing here has a probability.
"""

from collections import OrderedDict, deque

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from forge_jax.rollout.verify import NO_DRAFT

LONGEST = 8  # tokens of the end that are compared
SHORTEST = 2  # tokens that must agree
NOTHING = -1  # in a row: no token
PROMPTS = 1024  # whose completions are kept


def lookup(rows: Int[Array, "B S"], end: Int[Array, " B"], drafts: int) -> Int[Array, "B drafts"]:
    """What followed the longest earlier occurrence of each row's end; the latest among equals.

    ``rows[b, end[b] - 1]`` is the newest token, and from `end` on there is `NOTHING`. Drafts are
    `NO_DRAFT` where fewer than `SHORTEST` tokens agree.
    """
    size = rows.shape[1]
    place = jnp.arange(size)[None]
    agree, length = place < end[:, None], jnp.zeros(rows.shape, jnp.int32)
    for back in range(1, LONGEST + 1):
        at = end[:, None] - back
        token = jnp.take_along_axis(rows, jnp.maximum(at, 0), axis=1)
        known = (at >= 0) & (token != NOTHING)
        shifted = jnp.pad(rows, ((0, 0), (back, 0)), constant_values=NOTHING)[:, :size]
        agree &= known & (shifted == token)
        length += agree
    # The latest of the longest, without an argmax: that is slow on CPU.
    best = jnp.max(jnp.where(length >= SHORTEST, length * size + place, -1), axis=1)
    follows = jnp.where(best < 0, size, best % size)[:, None] + jnp.arange(drafts)[None]
    padded = jnp.pad(rows, ((0, 0), (0, drafts)), constant_values=NOTHING)
    found = jnp.take_along_axis(padded, jnp.minimum(follows, size + drafts - 1), axis=1)
    return jnp.where((best < 0)[:, None], NO_DRAFT, found)


def said(
    rows: Int[Array, "B S"],
    end: Int[Array, " B"],
    tokens: Int[Array, "B W"],
    count: Int[Array, " B"],
) -> Int[Array, "B S"]:
    """Rows with the first `count` of their new tokens behind what they had."""
    place = jnp.arange(tokens.shape[1])[None]
    index = jnp.where(place < count[:, None], end[:, None] + place, rows.shape[1])
    row = jnp.arange(len(rows))[:, None]
    return rows.at[row, index].set(tokens, mode="drop")


class Memory:
    """The newest completions of every prompt, on the host."""

    def __init__(self, size: int):
        """`size` is how many tokens are kept of a prompt, marks between completions included."""
        self.size = size
        self._said: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()

    def remember(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Keeps a completion, behind the end of its prompt so that its first token has a past;
        the oldest of the prompt, and prompts that had none for long, go."""
        key = prompt.tobytes()
        said = self._said.setdefault(key, deque())
        self._said.move_to_end(key)
        said.append(np.concatenate([prompt[-LONGEST:], output, [NOTHING]]).astype(np.int32))
        while sum(map(len, said)) - len(said[0]) >= self.size:
            said.popleft()
        if len(self._said) > PROMPTS:
            self._said.popitem(last=False)

    def recall(self, prompt: np.ndarray) -> np.ndarray:
        """i32[size]: completions of the prompt, the newest last, `NOTHING` before them and after
        each."""
        said = self._said.get(prompt.tobytes(), ())
        row = np.concatenate([np.full(self.size, NOTHING, np.int32), *said])
        return row[len(row) - self.size :]
