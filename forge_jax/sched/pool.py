"""The data pool: finished items, durable, so that producing and training may fail apart.

Flows in: the episodes of an item. Flows out: the same episodes, in this process or in a
later one. The invariant: a key holds all of an item or is not there; what is not intact
is never handed out.

Under the root, `items/000000000042` is item 42 and `corrupt/000000000042` an object
that was found damaged there. Calls block; threads may share a pool.
"""

import os
from collections.abc import Iterable, Sequence

import tensorstore as ts

from forge_jax.config import UserError
from forge_jax.sched.codec import CorruptObject, decode, encode
from forge_jax.types import Episode

_ITEMS = "items/"
_CORRUPT = "corrupt/"
_DIGITS = 12
_OPEN_SECONDS = 60.0  # after which a store that does not answer is not there
# Files are written under a name that no other write uses, synced, and renamed. The default
# locks one name per key instead and writes over what a killed writer left in it without
# cutting it: a shorter object then ends in the bytes of the older one (tensorstore 0.1.86).
_CONTEXT = {"file_io_locking": {"mode": "none"}, "file_io_sync": True}


class Pool:
    """A durable map from item number to the item's episodes.

    An item number names one group for good: putting the same episodes again changes
    nothing, so that a producer that died after a put may repeat it, and putting other
    episodes raises. One process writes to a pool at a time.
    """

    def __init__(self, store: ts.KvStore):
        self._store = store

    @classmethod
    def open(cls, location: str) -> "Pool":
        """Opens the pool at a folder's path or a `file://`, `memory://`, `gs://`, `s3://` URL.

        A folder is made on the first put; every `memory://` pool is its own. UserError,
        naming the location, where no pool can be.
        """
        if not location:
            raise UserError(f"pool={location!r} must be a path or a URL")
        if "://" in location:
            spec: str | dict[str, str] = location if location.endswith("/") else f"{location}/"
        else:
            spec = {"driver": "file", "path": os.path.abspath(location) + "/"}
        try:
            store = ts.KvStore.open(spec, context=ts.Context(_CONTEXT)).result()
            # No key is in this range: an unreachable root is found here, not at the first put.
            store.list(ts.KvStore.KeyRange(_ITEMS + "!", _ITEMS + "!!")).result(
                timeout=_OPEN_SECONDS
            )
        except (ValueError, NotImplementedError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_OPEN_SECONDS:g} seconds"
            raise UserError(f"pool={location!r} cannot be opened: {reason}") from error
        return cls(store)

    def put(self, item: int, episodes: Sequence[Episode]) -> None:
        """Stores an item; on return it survives the death of the process.

        Raises ValueError where an episode is of another item, or where the pool holds
        other episodes under this number.
        """
        for episode in episodes:
            if episode.item != item:
                raise ValueError(f"an episode of item {episode.item} put under item {item}")
        key, data = _key(item), encode(episodes)
        present = self._store.read(key).result()
        if present.state == "value":
            if present.value == data:
                return
            self._refuse_unless_corrupt(key, present)
        self._store.write(key, data).result()

    def get(self, item: int) -> tuple[Episode, ...]:
        """The episodes of an item.

        KeyError where it was never put. CorruptObject where it is damaged; the object
        is then moved under `corrupt/`, and the item may be put again.
        """
        key = _key(item)
        present = self._store.read(key).result()
        if present.state == "missing":
            raise KeyError(key)
        try:
            return decode(present.value, key)
        except CorruptObject:
            self._quarantine(key, present)
            raise

    def items(self) -> tuple[int, ...]:
        """Numbers of the items in the pool, in order."""
        keys = self._store.list(_under(_ITEMS), len(_ITEMS)).result()
        return tuple(sorted(_number(key.decode()) for key in keys))

    def corrupt(self) -> tuple[int, ...]:
        """Numbers of the items of which a damaged object is kept, in order."""
        keys = self._store.list(_under(_CORRUPT), len(_CORRUPT)).result()
        return tuple(sorted(_number(key.decode()) for key in keys))

    def delete(self, items: Iterable[int]) -> None:
        """Removes items; those that are not there are no error."""
        for write in [self._store.write(_key(item), None) for item in items]:
            write.result()

    def keep_only(self, items: Iterable[int]) -> tuple[int, ...]:
        """Removes every item but these, and says which it removed.

        For a resume: items put after the checkpoint are sampled again.
        """
        wanted = set(items)
        surplus = tuple(item for item in self.items() if item not in wanted)
        self.delete(surplus)
        return surplus

    def _refuse_unless_corrupt(self, key: str, present: ts.KvStore.ReadResult) -> None:
        try:
            decode(present.value, key)
        except CorruptObject:
            self._quarantine(key, present)
        else:
            raise ValueError(f"the pool holds other episodes under {key}")

    def _quarantine(self, key: str, present: ts.KvStore.ReadResult) -> None:
        self._store.write(_CORRUPT + key.removeprefix(_ITEMS), present.value).result()
        self._store.write(key, None).result()


def _key(item: int) -> str:
    if not 0 <= item < 10**_DIGITS:
        raise ValueError(f"{item=} is not in [0, 10**{_DIGITS})")
    return f"{_ITEMS}{item:0{_DIGITS}d}"


def _number(name: str) -> int:
    if len(name) != _DIGITS or not name.isdecimal():
        raise UserError(f"pool: {name!r} is not the key of an item")
    return int(name)


def _under(prefix: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
