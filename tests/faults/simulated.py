"""A world in which one thing happens at a time, and a seed decides which: a store, its faults, processes, time.

An *actor* is one thread of a process of a job: real code on a thread of ours, or a generator that yields what it asks
for. Both ask for the same things, all of them atomic: a call on the store, a sleep, a wait for something another actor
does. The world picks an actor that can go on, does what it asked for, with or without a fault, and lets it run to its
next question. So a schedule is a seed, and can be played again.

Faults: a put that fails and has landed, has not, or lands later; reads, listings and removals that fail; listings that
lag behind writes; a process that dies, and one that is stopped for a while and then goes on as if nothing had been.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage_backends.base import Entry, NotFound, Refused, StorageError, Unavailable

URL = "simulated:"
GRACE = 60.0
"""Seconds; longer than waiting for a commit and the latest landing of a put together, as PROTOCOL.md asks."""
WAIT, LATE, INTERVAL = 12.0, 25.0, 2.0
"""Seconds: waiting for a commit; how late a failed put may land; between heartbeats."""
STEPS = 1500
"""Calls after which a schedule is cut off, as if the power went."""

TENDER = ("snapshots/", "parts/", "prunes/")

Question = tuple[Any, ...]
Body = Callable[["Actor"], None]
Steps = Generator[Question, Any, None]


class Killed(BaseException):
    """The process of this actor is gone."""


class Violated(AssertionError):  # noqa: N818 - what the rule is
    """A rule that must hold in every schedule does not."""


@dataclass(eq=False)
class Process:
    """What dies or stops as one. `stoppable`: the longest stop, in seconds."""

    name: str
    stoppable: float = 3 * GRACE
    dead: bool = False
    stopped_until: float = 0.0


@dataclass(frozen=True)
class Rates:
    """How likely each fault is at each call, and the lag of listings in seconds."""

    put: float = 0.0
    other: float = 0.0
    death: float = 0.0
    stop: float = 0.0
    lag: float = 0.0


@dataclass(slots=True)
class Object:
    value: Any
    size: int
    landed: float
    by: str


class Watch(Protocol):
    """Who looks at everything that happens, and raises `Violated`."""

    def landed(self, key: str, found: Object) -> None: ...
    def removed(self, key: str, found: Object, by: str, now: float) -> None: ...
    def finish(self) -> None: ...


class Actor:
    """One thread of a process. `by` names whose work its objects are."""

    def __init__(self, world: World, process: Process, by: str) -> None:
        self.world, self.process, self.by = world, process, by
        self.wake = 0.0
        self.until: Callable[[], bool] | None = None
        self.done = False
        self.question: Question = ("begin",)

    def advance(self, answer: Any, error: StorageError | None) -> None:
        """Run with this answer to the next question, or the end."""
        raise NotImplementedError

    def end(self) -> None:
        """Unwind: no more calls."""

    def _asked(self, question: Question) -> None:
        self.question = question
        if question[0] == "sleep":
            self.wake = self.world.time + question[1]
        elif question[0] == "wait":
            self.until = question[1]


class Scripted(Actor):
    """An actor that is a generator."""

    def __init__(self, world: World, process: Process, by: str, steps: Callable[[Actor], Steps]) -> None:
        super().__init__(world, process, by)
        self._steps = steps(self)

    def advance(self, answer: Any, error: StorageError | None) -> None:
        try:
            if self.question == ("begin",):
                self._asked(next(self._steps))
            elif error is not None:
                self._asked(self._steps.throw(error))
            else:
                self._asked(self._steps.send(answer))
        except StopIteration:
            self.done = True

    def end(self) -> None:
        self._steps.close()


class _Worker(threading.Thread):
    """A thread that is used again: making one costs more than a whole schedule's switches."""

    idle: list[_Worker] = []  # noqa: RUF012 - one pool, filled and emptied by one thread at a time

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.body: Callable[[], None] = lambda: None
        self.start()

    def run(self) -> None:
        while True:
            self.go.acquire()
            self.body()
            self.back.release()


class Threaded(Actor):
    """An actor that is real code on a thread."""

    def __init__(self, world: World, process: Process, by: str, body: Body) -> None:
        super().__init__(world, process, by)
        self._body = body
        self._worker = _Worker.idle.pop() if _Worker.idle else _Worker()
        self._worker.body = self._live
        self._answer: Any = None
        self._error: BaseException | None = None
        self._over = False
        self.crash: BaseException | None = None

    def advance(self, answer: Any, error: BaseException | None) -> None:
        self._answer, self._error = answer, error
        self._worker.go.release()
        self._worker.back.acquire()
        if self.crash is not None:
            raise self.crash

    def end(self) -> None:
        self._over = True
        if not self.done and self.question != ("begin",):
            self._error = Killed()
            self._worker.go.release()
            self._worker.back.acquire()
        _Worker.idle.append(self._worker)

    def ask(self, question: Question) -> Any:
        """From the actor's thread: give the world its turn."""
        if self._over:
            raise Killed
        self._asked(question)
        self._worker.back.release()
        self._worker.go.acquire()
        if self._error is not None:
            raise self._error
        return self._answer

    def _live(self) -> None:
        try:
            self._body(self)
        except Killed:
            pass
        except BaseException as error:  # carried to the thread that plays the schedule
            self.crash = error
        self.done = True


class SimulatedStore:
    """The store as one actor sees it."""

    def __init__(self, actor: Threaded) -> None:
        self._ask = actor.ask

    @property
    def url(self) -> str:
        return URL

    def put(self, key: str, data: Any) -> None:
        self._ask(("put", key, bytes(data)))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(("get", key))
        return found

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        found = self.get(key)
        if stop > len(found):
            raise Refused(f"{key} ends before {stop}", store=URL, key=key)
        return found[start:stop]

    def list(self, prefix: str) -> Sequence[Entry]:
        found: Sequence[Entry] = self._ask(("list", prefix))
        return found

    def delete(self, keys: Sequence[str]) -> None:
        # Key by key: a prune can die between any two.
        failed: StorageError | None = None
        for key in keys:
            try:
                self._ask(("delete", key))
            except StorageError as error:
                failed = error
        if failed is not None:
            raise failed


class SimulatedClock:
    """Time as one actor sees it."""

    def __init__(self, actor: Threaded) -> None:
        self._actor = actor

    def monotonic(self) -> float:
        return self._actor.world.time

    def wall(self) -> float:
        return self._actor.world.time

    def sleep(self, seconds: float) -> None:
        self._actor.ask(("sleep", seconds))


@dataclass
class World:
    """Everything there is, and the one loop in which it happens."""

    seed: int
    rates: Rates
    watch: Watch
    time: float = 1000.0
    objects: dict[str, Object] = field(default_factory=dict)
    actors: list[Actor] = field(default_factory=list)
    calls: int = 0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._late: list[tuple[float, str, Any, str]] = []

    def spawn(self, actor: Actor, after: float = 0.0) -> None:
        actor.wake = self.time + after
        self.actors.append(actor)

    def nonce(self) -> str:
        return f"{self.random.getrandbits(32):08x}"

    def play(self) -> None:
        """To the end: nobody can go on, or the power goes. Then what was under way lands."""
        try:
            try:
                while self.calls < STEPS and (actor := self._pick()) is not None:
                    self._turn(actor)
            finally:
                for actor in self.actors:
                    actor.end()
            self.time += LATE
            self._land()
            self.watch.finish()
        except Violated as error:
            raise Violated(f"seed {self.seed}: {error}\n  " + "\n  ".join(self.log[-60:])) from error

    def _pick(self) -> Actor | None:
        for done in [a for a in self.actors if a.done]:
            done.end()
            self.actors.remove(done)
        while True:
            now = self.time
            ready, later = [], []
            for a in self.actors:
                if a.process.dead or (a.until is not None and not a.until()):
                    continue
                at = max(a.wake, a.process.stopped_until)
                (ready if at <= now else later).append((a, at))
            if ready and (not later or self.random.random() > 0.02):
                return ready[int(self.random.random() * len(ready))][0]
            if not later:
                return None
            self.time = min(at for _, at in later)

    def _turn(self, actor: Actor) -> None:
        self.calls += 1
        self.time += self.random.random() * 0.1
        self._land()
        question, actor.until = actor.question, None
        answer, error = None, None
        try:
            answer = self._do(actor, question)
        except StorageError as failed:
            error = failed
        process = actor.process
        if self.random.random() < self.rates.death:  # whoever asked does not learn the answer
            process.dead = True
            self._note(f"{process.name} dies")
            return
        actor.advance(answer, error)
        # Uniform luck hardly ever hits the few moments on which everything hangs: having looked, being about to act.
        tender = actor.question[0] in ("put", "delete") and actor.question[1].startswith(TENDER)
        if self.random.random() < self.rates.stop * (10 if tender else 1):
            longest = min(process.stoppable, self.random.choice((GRACE / 2, 3 * GRACE)))
            process.stopped_until = self.time + self.random.random() * longest
            self._note(f"{process.name} stops until {process.stopped_until:.1f}")

    def _do(self, actor: Actor, question: Question) -> Any:
        verb = question[0]
        if verb in ("begin", "sleep", "wait"):
            return None
        key = question[1]
        luck = self.random.random()
        if verb == "put":
            value = question[2]
            if luck >= self.rates.put:
                self._put(key, value, actor.by)
                return None
            fate = self.random.randrange(3)
            if fate == 0:
                self._put(key, value, actor.by)
            elif fate == 1:
                self._late.append((self.time + self.random.random() * LATE, key, value, actor.by))
            self._note(f"{actor.by}: put {key} fails, {('and has landed', 'and lands later', 'for good')[fate]}")
            raise Unavailable("failed on purpose", store=URL, key=key)
        if luck < self.rates.other:
            self._note(f"{actor.by}: {verb} {key} fails")
            raise Unavailable("failed on purpose", store=URL, key=key)
        if verb == "get":
            found = self.objects.get(key)
            if found is None:
                raise NotFound("not there", store=URL, key=key)
            return found.value
        if verb == "list":
            horizon = self.time - self.rates.lag
            return [
                Entry(k, o.size, o.landed)
                for k, o in sorted(self.objects.items())
                if k.startswith(key) and o.landed <= horizon
            ]
        assert verb == "delete", verb
        if (found := self.objects.pop(key, None)) is not None:
            self._note(f"{actor.by}: delete {key}")
            self.watch.removed(key, found, actor.by, self.time)
        return None

    def _put(self, key: str, value: Any, by: str) -> None:
        old = self.objects.get(key)
        size = len(value) if isinstance(value, bytes) else 1
        # An overwritten object stays listed as of its first landing; its modification time is not looked at (alive/).
        new = Object(value, size, self.time if old is None else old.landed, by)
        self.objects[key] = new
        if not key.startswith("alive/"):
            self._note(f"{by}: put {key}")
            if old is not None and old.value != value:
                raise Violated(f"{key} was written twice with different bytes, by {old.by} and {by}")
        self.watch.landed(key, new)

    def _land(self) -> None:
        if not self._late:
            return
        due = [p for p in self._late if p[0] <= self.time]
        if due:
            self._late = [p for p in self._late if p[0] > self.time]
            for _, key, value, by in due:
                self._put(key, value, by)

    def _note(self, text: str) -> None:
        self.log.append(f"{self.time:7.1f} {text}")
