"""Copies of every object in several places: an object is there once `at_least` of them hold it.

A put goes to all places at once. A crash
  before `at_least` of them have it  leaves what any failed put leaves: it may be there, or not;
  after that                         leaves an object of which some places lack a copy, as a failed place does.
A read asks one place after the other. A deletion needs all of them: what stayed behind in a place that was away would
come back with it, and then be listed without what it needs.

What a listing must be sure of. With n places, a listing that n - at_least + 1 of them answered shows everything that
was ever put. Fewer are enough only while this process has once been answered by so many, and only if one that answers
has missed nothing of what it wrote since: so a running job outlives the loss of a place, and none begins, on two
places with at_least=1, by taking the emptier one for the truth.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from storage_backends.base import (
    Buffer,
    Entry,
    NotFound,
    Refused,
    StorageError,
    Store,
    Unavailable,
    check_key,
    check_prefix,
    check_range,
    most_hopeful,
)
from storage_backends.copies import Slips, united, wrapped
from storage_backends.parallel import each

T = TypeVar("T")

log = logging.getLogger("ckpt.storage")


class FanoutStore:
    """Every object in each of several places.

    Args:
        places: two or more stores, the nearest first; each brings its own retries.
        at_least: how many must hold an object for a put to have worked; by default all but one. Safe against the loss
            of ``at_least - 1`` places at any moment, and against the loss of more once the others have caught up.

    A place that did not answer is left alone, by this process, until it answers a probe (`ckpt.history.copier`), or is
    needed.
    """

    def __init__(self, *places: Store, at_least: int | None = None) -> None:
        count = len(places)
        if count < 2:
            raise Refused(f"fanout of {count} places: expected two or more", store="fanout", key="")
        urls = [place.url for place in places]
        if len(set(urls)) < count:
            raise Refused(f"fanout of {', '.join(urls)}: a copy beside itself is none", store="fanout", key="")
        self._at_least = count - 1 if at_least is None else at_least
        if not 1 <= self._at_least <= count:
            raise Refused(f"at_least={at_least!r}: expected 1 to {count}, the places", store="fanout", key="")
        self._places = {str(n): place for n, place in enumerate(places, 1)}
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._missed: dict[str, set[str]] = {}
        self._away: set[str] = set()
        self.slips = Slips()

    @property
    def url(self) -> str:
        return "fanout::" + "|".join(place.url for place in self._places.values())

    @property
    def places(self) -> Mapping[str, Store]:
        return dict(self._places)

    @property
    def everywhere(self) -> bool:
        return True

    def copies(self, key: str) -> Mapping[str, Store]:
        """All places; those last that lack it, or are away."""
        with self._lock:
            behind = self._away | self._missed.get(key, set())
        ordered = sorted(self._places, key=lambda name: name in behind)
        return {name: self._places[name] for name in ordered}

    def over(self, wrap: Callable[[Store], Store]) -> Store:
        # Not a new one: which copies a place lacks is true however it was written, and is made up for by either.
        other = copy.copy(self)
        other._places = {name: wrapped(place, wrap) for name, place in self._places.items()}
        return other

    def missed(self) -> dict[str, tuple[str, ...]]:
        """What this process wrote and which places lack: key → their names, in the order in which it was written."""
        with self._lock:
            return {key: tuple(sorted(names)) for key, names in self._missed.items()}

    def away(self) -> tuple[str, ...]:
        """Places that did not answer, and are left alone since."""
        with self._lock:
            return tuple(sorted(self._away))

    def caught_up(self, key: str, names: Sequence[str]) -> None:
        """These places hold `key` now, or it is gone everywhere."""
        with self._lock:
            left = self._missed.get(key, set()).difference(names)
            if left:
                self._missed[key] = left
            else:
                self._missed.pop(key, None)

    def answers(self, name: str) -> None:
        """This place answered: it is asked again."""
        with self._lock:
            self._away.discard(name)

    def put(self, key: str, data: Buffer) -> None:
        check_key(key, store=self.url)

        def enough(held: Mapping[str, None]) -> bool:
            return len(held) >= self._at_least

        held, failed = self._ask_all(lambda place: place.put(key, data), enough)
        with self._lock:
            self._missed.pop(key, None)  # written last, made up for last
            if behind := self._places.keys() - held.keys():
                self._missed[key] = set(behind)
        if not enough(held):
            raise self._too_few("put", key, failed)

    def get(self, key: str) -> bytes:
        check_key(key, store=self.url)
        return self._read(key, lambda place: place.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(key, start, stop, store=self.url)
        return self._read(key, lambda place: place.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        check_prefix(prefix, store=self.url)
        heard, failed = self._ask_all(lambda place: place.list(prefix), self._enough)
        if not self._enough(heard):
            raise self._too_few("list", prefix, failed)
        return united(heard)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, store=self.url)
        if not keys:
            return
        if away := self.away():
            place = self._places[away[0]].url
            message = f"{self.url}: nothing is removed while {place} is away: it would come back with that place"
            raise Unavailable(message, store=self.url, key=keys[0])
        done, failed = self._ask_all(lambda place: place.delete(keys), lambda done: len(done) == len(self._places))
        with self._lock:
            for key in keys:
                if left := self._missed.pop(key, set()).difference(done):
                    self._missed[key] = left
        if failed:
            first = next(iter(failed.values()))
            kind = most_hopeful(failed.values())
            raise kind(f"{self.url}: {first}", store=self.url, key=first.key) from first

    def _ask_all(
        self, ask: Callable[[Store], T], enough: Callable[[Mapping[str, T]], bool]
    ) -> tuple[dict[str, T], dict[str, StorageError]]:
        """What every place answers, side by side: by name, results and errors. Those that are left alone are asked
        only where it is not enough without them."""
        results: dict[str, T] = {}
        failed: dict[str, StorageError] = {}

        def one(name: str) -> tuple[str, T | StorageError]:
            try:
                return name, ask(self._places[name])
            except StorageError as error:
                return name, error

        away = self.away()
        for names in ([name for name in self._places if name not in away], away):
            if names is away and enough(results):
                break
            for name, found in each(one, names, threads=len(names)):
                if isinstance(found, StorageError):
                    failed[name] = found
                    self._leave_alone(name, found)
                else:
                    results[name] = found
                    self.answers(name)
        return {name: results[name] for name in self._places if name in results}, failed

    def _read(self, key: str, ask: Callable[[Store], T]) -> T:
        """What the first place gives that can. Copies before it that were not there, or too short, are noted."""
        failed: dict[str, StorageError] = {}
        for name, place in self.copies(key).items():
            try:
                found = ask(place)
            except StorageError as error:
                failed[name] = error
                self._leave_alone(name, error)
                continue
            if any(not isinstance(error, Unavailable) for error in failed.values()):
                self.slips.note(key)
            return found
        answered = {name: error for name, error in failed.items() if not isinstance(error, Unavailable)}
        if not self._enough(answered):
            raise self._too_few("get", key, {name: error for name, error in failed.items() if name not in answered})
        if refused := [error for error in answered.values() if not isinstance(error, NotFound)]:
            raise refused[0]  # it is there, and is not what was asked for: no place says otherwise
        raise NotFound(f"{self.url}: {key} is not there", store=self.url, key=key)

    def _leave_alone(self, name: str, error: StorageError) -> None:
        """A place that does not answer costs the whole deadline of its retries each time: once is enough."""
        if not isinstance(error, Unavailable):
            return
        with self._lock:
            news = name not in self._away
            self._away.add(name)
        if news:
            log.warning("%s does not answer and is left alone, the other copies are used: %s", name, error)

    def _enough(self, answered: Mapping[str, object]) -> bool:
        """Whether what these places say together is the whole truth (see above)."""
        with self._lock:
            if len(answered) > len(self._places) - self._at_least:
                self._heard.set()
                return True
            behind: set[str] = set().union(*self._missed.values())
            return self._heard.is_set() and any(name not in behind for name in answered)

    def _too_few(self, verb: str, key: str, failed: Mapping[str, StorageError]) -> StorageError:
        kind = most_hopeful(failed.values())
        first = next(iter(failed.values()))
        needed = self._at_least if verb == "put" else len(self._places) - self._at_least + 1
        done = len(self._places) - len(failed)
        message = (
            f"{self.url}: could not {verb} {key!r}: {done} of {len(self._places)} places answered, needed are {needed} "
            f"(at_least={self._at_least}); {first}"
        )
        if verb != "put" and kind is not Refused:
            message += "; bring it back, or give the URL of one that is there to go on with that alone"
        return kind(message, store=self.url, key=key, attempts=first.attempts, seconds=first.seconds)
