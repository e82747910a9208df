"""Thoughts that clients hand back, and how it is known that they are ours.

The text of a thought flows in, a signature or a sealed copy flows out, and the other way round.
Both hold as long as the process does, as the record does that a thought belongs to.
"""

import base64
import hashlib
import hmac
import secrets

KEY = secrets.token_bytes(32)
SIZE = hashlib.sha256().digest_size


def signature(thought: str) -> str:
    """What proves that `thought` was told by this process."""
    return base64.b64encode(_mark(thought.encode())).decode()


def signed(thought: str, by: str) -> bool:
    """Whether `by` is the signature of `thought`."""
    return hmac.compare_digest(signature(_sound(thought)).encode(), _sound(by).encode())


def sealed(thought: str) -> str:
    """A thought as an opaque text that `unsealed` reads."""
    return base64.b64encode(_mark(thought.encode()) + thought.encode()).decode()


def unsealed(text: str) -> str:
    """The thought that was sealed, "" where it was not sealed here."""
    try:
        raw = base64.b64decode(_sound(text), validate=True)
    except ValueError:
        return ""
    return raw[SIZE:].decode() if hmac.compare_digest(raw[:SIZE], _mark(raw[SIZE:])) else ""


def _mark(raw: bytes) -> bytes:
    return hmac.digest(KEY, raw, "sha256")


def _sound(text: str) -> str:
    """`text` without the lone surrogates that JSON can smuggle in."""
    return text.encode("utf-8", "replace").decode()
