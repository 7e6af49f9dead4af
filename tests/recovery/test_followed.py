"""Whoever reads a snapshot goes on with the revision that takes its place, at whichever call the exchange strikes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.errors import NoSnapshot
from ckpt.format.names import RunId, SnapshotId, SnapshotName
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Keep
from ckpt.history.pins import pin
from ckpt.history.retention import execute, plan_prune
from recovery.agree import Alone
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.compare import compare
from recovery.foreign_safetensors import read_safetensors, write_safetensors
from recovery.load import load, load_into
from recovery.looking import History
from recovery.outward import open_export
from recovery.read import Pruned
from recovery.restore import restore
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.recovery.lives import train_and_store
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter
from tests.support.training import Training

STEPS = range(1, 10)


class Exchange(FaultyStore):
    """A store on which, just before the n-th call, a compaction and a prune have been: `new` comes, `old` goes."""

    def __init__(self, inner: Store, at: int, new: dict[str, bytes], old: list[str]) -> None:
        super().__init__(inner)
        self._strike_at, self._new, self._old = at, new, old
        self.struck = False

    def _call(self, verb: str, key: str, do: Callable[[], Any]) -> Any:
        if len(self.calls) + 1 == self._strike_at:
            self.struck = True
            for name, data in self._new.items():
                self.survived().put(name, data)
            self.survived().delete(self._old)
        return super()._call(verb, key, do)


@cache
def exchanged() -> tuple[dict[str, bytes], dict[str, bytes], list[str], SnapshotId, dict[str, bytes]]:
    """Objects before; what comes; what goes, in order; the snapshot, and its tensors by path."""
    store = MemoryStore()
    _, ids = train_and_store(store, STEPS)
    expected = tensors_of(store, ids[-1])
    last = DirectWriter(store, run=RunId(2, "0ddba11e"))
    last.begin(resumed_from=ids[-1])
    last.step(100, {"w": np.zeros(3)})
    pin(store, read_history(store), "kept", ids[-1])
    prune(store)
    before = {e.key: store.get(e.key) for e in store.list("")}
    plan = plan_compact(store, threshold=1.0, threads=1)
    assert ids[-1] in plan.rewrite
    compact(plan, store)
    gone = prune(store)
    after = {e.key: store.get(e.key) for e in store.list("")}
    assert SnapshotName(ids[-1]).key in gone
    assert any(key.startswith("packs/") for key in gone)
    new = {key: data for key, data in after.items() if key not in before}
    return before, new, gone, ids[-1], expected


def tensors_of(store: Store, id_: SnapshotId) -> dict[str, bytes]:
    found = load(store, str(id_))
    return {p: content(v) for p, v in found.items() if isinstance(v, torch.Tensor)}


def content(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@cache
def trained() -> dict[str, bytes]:
    return train_and_store(MemoryStore(), STEPS)[0][STEPS[-1]]


def prune(store: Store) -> list[str]:
    return list(execute(plan_prune(store, Keep(last=1), grace=0, threads=1), store, clock=SystemClock()).keys)


def each_strike(read: Callable[[Exchange], None], *, gone_for_good: bool = False) -> int:
    """`read`, with the exchange before its first call, its second, and so on; how often it struck."""
    before, new, old, _, _ = exchanged()
    for at in range(1, 200):
        inner = MemoryStore()
        for key, data in before.items():
            inner.put(key, data)
        store = Exchange(inner, at, {} if gone_for_good else new, old)
        read(store)
        if not store.struck:
            return at - 1
    raise AssertionError("it never came to an end")


def test_load_follows() -> None:
    _, _, _, id_, expected = exchanged()

    def read(store: Exchange) -> None:
        assert tensors_of(store, id_) == expected

    assert each_strike(read) > 4


def test_load_into_and_restore_follow() -> None:
    _, _, _, id_, _ = exchanged()
    expected = trained()

    def into(store: Exchange) -> None:
        training = Training(seed=3)
        assert load_into(store, training.state, str(id_)).skipped == ()
        assert training.bytes() == expected

    def whole(store: Exchange) -> None:
        training = Training(seed=3)
        restored = restore(store, Alone(), training.state, step=str(id_), claim=lambda _: True, threads=1)
        assert restored is not None
        assert restored.skipped == ()
        assert training.bytes() == expected

    assert each_strike(into) > 4
    assert each_strike(whole) > 4


def test_diff_follows_on_both_sides() -> None:
    _, _, _, id_, expected = exchanged()

    def read(store: Exchange) -> None:
        assert compare(store, id_, id_, threads=1).equal

    assert each_strike(read) > 4

    def two(store: Exchange) -> None:
        found = History(store).diff(str(id_), "latest")
        assert {leaf.path for leaf in found.leaves if leaf.verdict == "removed"} >= expected.keys()

    assert each_strike(two) > 4


def test_export_follows_into_every_window(tmp_path: Path) -> None:
    _, _, _, id_, expected = exchanged()
    number = iter(range(1000))

    def read(store: Exchange) -> None:
        (out,) = write_safetensors(open_export(store, id_), tmp_path / f"{next(number)}.safetensors")
        there = {t.shard.leaf.path: t.read(0, t.shard.nbytes).tobytes() for t in read_safetensors(out).tensors}
        assert {path: there[path] for path in expected} == expected

    assert each_strike(read) > 4


@pytest.mark.parametrize("deep", [False, True])
def test_verify_finds_no_damage_where_a_revision_took_the_place_of_another(deep: bool) -> None:
    def read(store: Exchange) -> None:
        assert [f.text for f in verify(store, deep=deep, threads=1) if f.level == "error"] == []

    assert each_strike(read) > 4


@pytest.mark.parametrize("deep", [False, True])
def test_verify_takes_what_a_prune_removed_under_it_for_pruned(deep: bool) -> None:
    def read(store: Exchange) -> None:
        assert [f.text for f in verify(store, deep=deep, threads=1) if f.level == "error"] == []

    assert each_strike(read, gone_for_good=True) > 4


def test_what_was_pruned_for_good_is_said_to_be() -> None:
    _, _, _, id_, _ = exchanged()
    told = 0

    def read(store: Exchange) -> None:
        nonlocal told
        for attempt in (
            lambda: load(store, str(id_)), lambda: open_export(store, id_), lambda: compare(store, id_, id_, threads=1),
        ):  # fmt: skip
            try:
                attempt()
            except (NoSnapshot, Pruned):
                told += 1

    each_strike(read, gone_for_good=True)
    assert told > 10


def test_the_command_line_follows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """show, du and plan, which read the parts alone."""
    _, _, _, id_, expected = exchanged()
    for verb in (["show", "memory:", str(id_)], ["plan", "memory:", "--step", str(id_), "--lost", "0"]):

        def read(store: Exchange, verb: list[str] = verb) -> None:
            monkeypatch.setattr(f"ckpt.cli.{verb[0]}.open_url", lambda *_: store)
            assert main([*verb, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert told["id"] == str(id_)

        assert each_strike(read) > 4

    def usage(store: Exchange) -> None:
        assert ckpt.History(store).du(str(id_)).of == id_

    assert each_strike(usage) > 4
    assert expected
