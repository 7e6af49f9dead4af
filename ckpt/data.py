"""Where training stands in its data, so that a restarted job draws the same batches and the same dropout (torch).

A plain loader is replayed. The order of an epoch hangs on the random states at its start: `iter()` draws from them, and
so does the first `next()`. So what is recorded is (epoch, batches drawn, states at the epoch's start), and the way back
is, in this order:

    states of the epoch's start  →  iter()  →  draw and drop the batches already seen  →  states of the save

Setting the states of the save first and skipping then (the shorter way) gives another order. A loader that resumes
itself has the middle done by ``load_state_dict`` and ``iter()``; both draw, so the states of the save still come last.

The next batch is drawn after the states of the save are set, since that is when the run that was not hurt draws it. A
save at the very end of an epoch is not special: the replay runs through the epoch, finds its end, and begins the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from ckpt.errors import LayoutMismatch
from ckpt.loaders import (
    PackedTensor,
    check_loader,
    describe,
    generator_states,
    pack_state,
    resumes_itself,
    set_epoch,
    set_generator_states,
    unpack_state,
)
from ckpt.random_states import random_states, set_random_states

log = logging.getLogger("ckpt")

_Count = Annotated[int, msgspec.Meta(ge=0)]
_END = object()


class _Place(msgspec.Struct, frozen=True):
    """One position, as the part document holds it.

    `number`: the how-manieth loader of the script this is. `index`: batches of the epoch drawn. `state`, `tensors`: of
    a loader that resumes itself.
    """

    number: _Count
    loader: dict[str, Any]
    epoch: _Count
    index: _Count
    start: dict[str, Any]
    start_generators: list[bytes]
    generators: list[bytes]
    state: Any = None
    tensors: list[PackedTensor] = []


class _Stream:
    """One loader, run through epoch by epoch."""

    def __init__(self, loader: Any, number: int) -> None:
        self.loader = loader
        self.number = number
        self.rewind()

    def rewind(self) -> None:
        """Back to before the first epoch; workers are let go."""
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._index = 0
        self._about: dict[str, Any] = {}
        self._start: dict[str, Any] = {}
        self._start_generators: list[bytes] = []

    def draw(self) -> Any:
        """The next batch, of the next epoch if this one is over."""
        if self._iterator is None:
            self._iterator = self._begin_epoch()
        batch = next(self._iterator, _END)
        if batch is _END:
            if self._index:
                self._epoch, self._index, self._iterator = self._epoch + 1, 0, None
                self._iterator = self._begin_epoch()
                batch = next(self._iterator, _END)
            if batch is _END:
                raise ValueError(
                    f"the {type(self.loader).__name__} gave no batch in epoch {self._epoch}; it is empty (fewer "
                    "samples than one batch with drop_last=True?) or cannot be iterated a second time"
                )
        self._index += 1
        return batch

    def record(self) -> dict[str, Any]:
        """This position as a plain tree."""
        state, tensors = pack_state(self.loader.state_dict()) if resumes_itself(self.loader) else (None, [])
        place = _Place(
            self.number,
            self._about,
            self._epoch,
            self._index,
            self._start,
            self._start_generators,
            generator_states(self.loader),
            state,
            tensors,
        )
        return msgspec.structs.asdict(place) | {"tensors": [msgspec.structs.asdict(tensor) for tensor in tensors]}

    def resume(self, place: _Place, random: Any) -> None:
        """Stand where `place` says, with the random states of the save, ready for the next `draw`."""
        loader = self.loader
        set_epoch(loader, place.epoch)
        about = describe(loader)
        changed = {
            what: f"stored {place.loader.get(what)}, live {about.get(what)}"
            for what in (*about, *(what for what in place.loader if what not in about))
            if place.loader.get(what) != about.get(what)
        }
        if changed:
            text = "; ".join(f"{what}: {how}" for what, how in changed.items())
            raise LayoutMismatch(
                f"data: the loader is not the one of the snapshot ({text}), so batch {place.index} of epoch "
                f"{place.epoch} is another one; make it as in that run, or loop over range() instead of batches()",
                changed=changed,
            )
        self._epoch, self._index, self._about = place.epoch, place.index, about
        self._start, self._start_generators = place.start, place.start_generators
        set_random_states(place.start)
        set_generator_states(loader, place.start_generators)
        self._iterator = self._loaded(place) if resumes_itself(loader) else self._replayed(place)
        set_generator_states(loader, place.generators)
        if random is not None:
            set_random_states(random)

    def _begin_epoch(self) -> Iterator[Any]:
        set_epoch(self.loader, self._epoch)
        # After set_epoch, since the length of some samplers depends on the epoch.
        self._about = describe(self.loader)
        self._start = random_states()
        self._start_generators = generator_states(self.loader)
        return iter(self.loader)

    def _loaded(self, place: _Place) -> Iterator[Any]:
        try:
            self.loader.load_state_dict(unpack_state(place.state, place.tensors))
            iterator: Iterator[Any] = iter(self.loader)
        except Exception as error:
            # Whatever a foreign loader raises on a state it does not understand, AssertionError included.
            raise LayoutMismatch(
                f"data: the {type(self.loader).__name__} refused the state it saved at batch {place.index} of epoch "
                f"{place.epoch}: {type(error).__name__}: {error}; make the loader as in the run that saved"
            ) from error
        return iterator

    def _replayed(self, place: _Place) -> Iterator[Any]:
        if place.index > 1000:
            log.info("data: drawing %d batches again to get back to where epoch %d stood", place.index, place.epoch)
        iterator: Iterator[Any] = iter(self.loader)
        for drawn in range(place.index):
            if next(iterator, _END) is _END:
                raise LayoutMismatch(
                    f"data: epoch {place.epoch} ended after {drawn} batches, but the snapshot stands after batch "
                    f"{place.index}; the data have changed since; restore them, or loop over range() without batches()"
                )
        return iterator


class Position:
    """The data position of one `Checkpointer`. Belongs to the training thread.

    A script may use several loaders, one after the other; they are told apart by the order of the `batches` calls, so
    a restarted script must make these calls again, also those that have nothing left to give.
    """

    def __init__(self) -> None:
        self._streams = 0
        self._latest: _Stream | None = None  # what batches() was last called with
        self._drawn: _Stream | None = None  # what the last batch came from
        self._waiting: tuple[_Place, dict[str, Any], Any] | None = None  # restored, and not drawn from yet
        self._next_step: int | None = None

    def batches(
        self, loader: Any, *, start: int, total: int, stopping: Callable[[], bool]
    ) -> Iterator[tuple[int, Any]]:
        """``(step, batch)`` for the steps from `start` up to `total`, over as many epochs as it takes.

        Called again with the same loader it goes on where it stood, in the middle of an epoch too, and `start` does
        not matter. A plain loader is resumed by drawing the epoch's batches once more, which takes as long as loading
        them does without training; a StatefulDataLoader is back at once.

        Args:
            loader: a DataLoader, a StatefulDataLoader, or any iterable that can be iterated again. Whatever has a
                ``set_epoch`` (loader, samplers, dataset) is told the epoch, from 0, before each.
            stopping: asked before each batch is drawn; true ends the loop.

        Raises:
            TypeError, ValueError: the loader cannot be resumed exactly, see `check_loader`; or it is empty.
            LayoutMismatch: (at the first batch) the loader is not like that of the restored snapshot.
        """
        check_loader(loader)
        if self._latest is None or self._latest.loader is not loader:
            self._latest = _Stream(loader, self._streams)
            self._streams += 1
        return self._run(self._latest, start, total, stopping)

    def record(self) -> dict[str, Any] | None:
        """This position as a plain tree: after the body of a step, before the next batch. None if no batch was drawn
        and none restored."""
        if self._waiting is not None:
            return self._waiting[1]
        return None if self._drawn is None else self._drawn.record()

    def resume(self, tree: Any, random: Any = None) -> None:
        """What the next `batches` starts from.

        Args:
            tree: what `record` returned, or None: from the beginning.
            random: the random states of the same save; `batches` sets them just before it draws the first batch.

        Raises:
            LayoutMismatch: `tree` is not a position.
        """
        place = None
        if tree is not None:
            try:
                place = msgspec.convert(tree, _Place)
            except msgspec.ValidationError as error:
                raise LayoutMismatch(
                    f"data: the snapshot's data position is not one this version understands: {error}"
                ) from error
        self._waiting = None if place is None else (place, tree, random)
        self._drawn = None
        self._next_step = None
        if self._latest is not None:
            self._latest.rewind()

    def close(self) -> None:
        """Let the loader's workers go. Nothing can be drawn or recorded any more."""
        for stream in (self._latest, self._drawn):
            if stream is not None:
                stream.rewind()
        self._latest = self._drawn = self._waiting = None

    def _run(self, stream: _Stream, start: int, total: int, stopping: Callable[[], bool]) -> Iterator[tuple[int, Any]]:
        # The restored step belongs to the first call; a second one goes on from the last step given out.
        step = start if self._next_step is None else self._next_step
        while step < total and not stopping():
            if self._waiting is not None:
                self._settle(stream)
            batch = stream.draw()
            self._drawn = stream
            self._next_step = step + 1
            yield step, batch
            step += 1

    def _settle(self, stream: _Stream) -> None:
        assert self._waiting is not None
        place, _, random = self._waiting
        if place.number > stream.number:
            raise LayoutMismatch(
                f"data: the snapshot stands in loader {place.number} of the script, counted from 0, and this is loader "
                f"{stream.number}; call batches() for all loaders in the order of the run that saved, also for those "
                "that have no step left"
            )
        if place.number == stream.number:
            stream.resume(place, random)
        # Otherwise the save was made when an earlier loader had given its last batch, and this one begins afresh.
        self._waiting = None
