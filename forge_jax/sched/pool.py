"""The data pool: finished items, durable, so that producing and training may fail apart.

Flows in: the episodes of an item. Flows out: the same episodes, in this process or in a
later one. The invariant: a key holds all of an item or is not there; what is not intact
is never handed out; the first to put an item is the only one.

Under the root, `items/000000000042` is item 42, `corrupt/000000000042` an object that was
found damaged there, `segments/` holds items that were compacted (`segments`), `owner` says whose
the items are, and `lease`, in a folder `locks/`, is what processes lock (`locks`). Calls block;
threads and processes may share a pool.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import tensorstore as ts

from forge_jax.config import UserError
from forge_jax.sched.answers import ANSWER_SECONDS, answer, names_under
from forge_jax.sched.codec import CorruptObject, decode, encode
from forge_jax.sched.locks import PoolBusy, keeping, locked
from forge_jax.sched.segments import Segments
from forge_jax.stores import CONTEXT, spec_of
from forge_jax.types import Episode

_ITEMS = "items/"
_CORRUPT = "corrupt/"
_OWNER = "owner"
_LOCKS = 64  # files that writers of a folder lock, one for every so many items
_DIGITS = 12


class Pool:
    """A durable map from item number to the item's episodes.

    An item number names one group for good: putting the same episodes again changes
    nothing, so that a producer that died after a put may repeat it, and putting other
    episodes raises. Every call may raise StoreUnavailable, and may then be repeated, or
    StoreRefused. `delete` and `compact` raise PoolBusy while another process is at either.
    """

    def __init__(self, store: ts.KvStore, folder: Path | None = None):
        """`folder` is where the store's files are: conditional writes to files are no one-step
        operations, so writers also lock a file there."""
        self._store = store
        self._folder = folder
        self._segments = Segments(store)
        self._absent: bytes = answer(store.read(_ITEMS + "!")).stamp.generation

    @classmethod
    def open(cls, location: str) -> "Pool":
        """Opens the pool at a folder's path, a `file://`, `memory://`, `gs://`, `s3://` URL, or
        a kvstore spec of tensorstore as JSON.

        A folder is made on the first put; every `memory://` pool is its own. UserError,
        naming the location, where no pool can be.
        """
        try:
            spec = spec_of(location)
            store = ts.KvStore.open(spec, context=ts.Context(CONTEXT)).result(ANSWER_SECONDS)
            # No key is in this range: an unreachable root is found here, not at the first put.
            store.list(ts.KvStore.KeyRange(_ITEMS + "!", _ITEMS + "!!")).result(ANSWER_SECONDS)
            full = store.spec().to_json()
            return cls(store, Path(full["path"]) if full["driver"] == "file" else None)
        except (ValueError, NotImplementedError, OSError) as error:
            reason = str(error) or f"no answer in {ANSWER_SECONDS:g} seconds"
            raise UserError(f"pool={location!r} cannot be opened: {reason}") from error

    @property
    def location(self) -> str:
        """Where the items are, as a kvstore spec that `open` takes."""
        return json.dumps(self._store.spec().to_json())

    def owner(self) -> bytes | None:
        """What the pool's owner is, or None where nobody has claimed it."""
        found = answer(self._store.read(_OWNER))
        return found.value if found.state == "value" else None

    def claim(self, owner: bytes) -> bytes:
        """Makes `owner` the pool's unless it has one already; the one it then has."""
        with self._alone(_OWNER):
            answer(self._store.write(_OWNER, owner, if_equal=self._absent))
            return answer(self._store.read(_OWNER)).value

    def put(self, item: int, episodes: Sequence[Episode]) -> bool:
        """Stores an item; on return it survives the death of the process.

        True where this call stored it, False where the same episodes were there (also from
        a write of this call whose answer was lost on the way). Raises ValueError where an
        episode is of another item, or where the pool holds other episodes under this number.
        """
        for episode in episodes:
            if episode.item != item:
                raise ValueError(f"an episode of item {episode.item} put under item {item}")
        return self.put_object(item, encode(episodes))

    def put_object(self, item: int, data: bytes) -> bool:
        """`put`, of episodes that are encoded."""
        key = _key(item)
        with self._alone(_lock(item)):
            while True:
                # A write that the store did and whose answer was lost is met below as `present`.
                wrote = answer(self._store.write(key, data, if_equal=self._absent))
                if wrote.generation:
                    return self._first(item, key, data, wrote.generation)
                present = answer(self._store.read(key))
                if present.state == "missing":
                    continue
                if _intact(present.value, key):
                    return _same(data, present.value, key)
                self._quarantine(key, present)

    def get(self, item: int) -> tuple[Episode, ...]:
        """The episodes of an item.

        KeyError where it was never put. CorruptObject where it is damaged; the object
        is then moved under `corrupt/`, and the item may be put again.
        """
        key, data = _key(item), self.get_object(item)
        try:
            return decode(data, key)
        except CorruptObject:
            if not self._put_aside(item, data):
                self._put_aside_compacted(item, data)
            raise

    def get_object(self, item: int) -> bytes:
        """An item as it is stored, perhaps damaged. KeyError where it was never put."""
        key = _key(item)
        present = answer(self._store.read(key))
        if present.state == "value":
            return present.value
        compacted = self._segments.read(item)
        if compacted is None:
            raise KeyError(key)
        return compacted

    def items(self) -> tuple[int, ...]:
        """Numbers of the items in the pool, in order."""
        loose = self.loose()  # first: what is compacted meanwhile is then in a segment
        self._segments.refresh()
        return tuple(sorted(self._segments.items().union(loose)))

    def loose(self) -> tuple[int, ...]:
        """Numbers of the items that have an object of their own, in order."""
        return tuple(sorted(map(_number, names_under(self._store, _ITEMS))))

    def corrupt(self) -> tuple[int, ...]:
        """Numbers of the items of which a damaged object is kept, in order."""
        return tuple(sorted(map(_number, names_under(self._store, _CORRUPT))))

    def delete(self, items: Iterable[int]) -> None:
        """Removes items; those that are not there are no error."""
        gone = set(items)
        if not gone:
            return
        with keeping(self._store, self._folder) as held:
            self._segments.without(gone, held)
            held()
            for write in [self._store.write(_key(item), None) for item in gone]:
                answer(write)

    def compact(self, items: Sequence[int]) -> int:
        """Merges items into one segment; how many it did. Their numbers read as before.

        Damaged ones are put aside, as `get` does. A process may be killed at any moment, and
        the same items compacted again: an object is deleted only when the segment that has
        it was read back.
        """
        with keeping(self._store, self._folder) as held:
            return self._compact(items, held)

    def _compact(self, items: Sequence[int], held: Callable[[], None]) -> int:
        self._segments.refresh()
        reads = {item: self._store.read(_key(item)) for item in items}
        present = {item: answer(read) for item, read in reads.items()}
        present = {item: found for item, found in present.items() if found.state == "value"}
        damaged = {i for i, found in present.items() if not _intact(found.value, _key(i))}
        doubled = {i for i in present if self._segments.holding(i)}
        for item in damaged | {i for i in doubled if self._segments.read(i) != present[i].value}:
            self._put_aside(item, present[item].value)  # what a segment has was put first
        fresh = present.keys() - damaged - doubled
        held()
        if fresh:
            self._segments.write({item: present[item].value for item in fresh})
            held()
        gone = [
            self._store.write(_key(item), None, if_equal=present[item].stamp.generation)
            for item in present.keys() - damaged
        ]
        for write in gone:
            answer(write)
        return len(fresh)

    def _first(self, item: int, key: str, data: bytes, generation: bytes) -> bool:
        """True if nobody had put the item before it was stored as this generation."""
        self._segments.refresh()  # after the write: what was compacted before it is seen
        compacted = self._segments.read(item) if self._segments.holding(item) else None
        if compacted is None or not _intact(compacted, key):
            return True
        answer(self._store.write(key, None, if_equal=generation))
        return _same(data, compacted, key)

    def _put_aside(self, item: int, data: bytes) -> bool:
        """Moves the object of an item under `corrupt/`, unless it is no longer `data`. False
        where the item has none of its own."""
        key = _key(item)
        with self._alone(_lock(item)):
            present = answer(self._store.read(key))
            if present.state == "value" and present.value == data:
                self._quarantine(key, present)
        return present.state == "value"

    def _put_aside_compacted(self, item: int, data: bytes) -> None:
        """The same of an item in a segment, unless another process is at the segments."""
        try:
            with keeping(self._store, self._folder) as held:
                if self._segments.read(item) == data:
                    key = _key(item).removeprefix(_ITEMS)
                    answer(self._store.write(_CORRUPT + key, data))
                    self._segments.without({item}, held)
        except PoolBusy:
            return  # whoever reads it next puts it aside

    def _quarantine(self, key: str, present: ts.KvStore.ReadResult) -> None:
        answer(self._store.write(_CORRUPT + key.removeprefix(_ITEMS), present.value))
        # Unless another has healed it meanwhile.
        answer(self._store.write(key, None, if_equal=present.stamp.generation))

    def _alone(self, name: str) -> AbstractContextManager[None]:
        """Holds, in a folder, a lock; the system frees it when a process dies."""
        return nullcontext() if self._folder is None else locked(self._folder, name)


def _same(data: bytes, present: bytes, key: str) -> bool:
    """False: nothing was stored. Raises ValueError where what is there differs."""
    if present != data:
        raise ValueError(f"the pool holds other episodes under {key}")
    return False


def _intact(data: bytes, key: str) -> bool:
    try:
        decode(data, key)
    except CorruptObject:
        return False
    return True


def _key(item: int) -> str:
    if not 0 <= item < 10**_DIGITS:
        raise ValueError(f"{item=} is not in [0, 10**{_DIGITS})")
    return f"{_ITEMS}{item:0{_DIGITS}d}"


def _lock(item: int) -> str:
    return f"{item % _LOCKS:02d}"


def _number(name: str) -> int:
    if len(name) != _DIGITS or not name.isdecimal():
        raise UserError(f"pool: {name!r} is not the key of an item")
    return int(name)
