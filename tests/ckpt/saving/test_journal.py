"""Steps between snapshots: recorded, proven, replayed. One process, on a store in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import NoSnapshot, UnsupportedState
from ckpt.history.catalog import read_history
from ckpt.rolling import OPTIMIZERS
from ckpt.saving import keeping
from storage_backends.memory import MemoryStore
from tests.support.faulty import GateStore
from tests.support.journals import EVERY_STEP, QUIET, Killed, comes_back, job, killed, recording, unhurt
from tests.support.stores import flipped
from tests.support.training import Training

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]


class Chosen(Training):
    """With an optimizer of choice, clipping, and two groups."""

    def __init__(self, kind: str, options: dict[str, Any], seed: int = 0) -> None:
        super().__init__(seed)
        first, *rest = self.model.parameters()
        groups = [{"params": [first], "weight_decay": 0.1}, {"params": rest}]
        self.optimizer = OPTIMIZERS[kind](groups, **options)  # type: ignore[arg-type,assignment]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)

    def train(self, step: int) -> float:
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def test_a_killed_training_goes_on_from_its_last_step_and_ends_bit_identical() -> None:
    store = MemoryStore()
    expected = recording(unhurt(20))
    job(store, Training(), 8)
    second = Training(seed=7)
    saver = job(store, second, 13)
    assert saver.restored is not None and saver.restored.step == 8
    assert (saver.restored.id.step, saver.restored.replayed, saver.restored.lost) == (5, 8, 0)
    assert "replayed from step 5; 0 completed steps are lost" in str(saver.restored)
    assert saver.restored.bytes["journal"] > 0 and saver.restored.seconds["replay"] > 0
    third = Training(seed=9)
    saver = job(store, third, 20)
    assert saver.restored is not None and saver.restored.step == 13
    assert recording(third) == expected


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_supported_optimizer_is_replayed_to_the_bit(kind: str, options: dict[str, Any]) -> None:
    comes_back(lambda seed: Chosen(kind, options, seed), 9, 9)


def test_any_of_a_hundred_steps_loads_as_it_was_live() -> None:
    store = MemoryStore()
    training = Training()
    seen: dict[int, dict[str, bytes]] = {}
    job(store, training, 100, every=40, each=lambda step: seen.update({step: training.bytes()}))
    for step in range(1, 101, 7):
        found = ckpt.load(store, step=step)
        for name, parameter in training.model.state_dict().items():
            assert found[f"model.{name}"].numpy().tobytes() == seen[step][name], f"step {step}: {name}"
            slot = found.get(f"optimizer.state.model.{name}.exp_avg")
            if isinstance(parameter, nn.Parameter) or slot is not None:
                assert slot is not None and slot.numpy().tobytes() == seen[step][f"{name}.exp_avg"]
        assert found["schedule.last_epoch"] == step
    other = Training(seed=3)
    restored = ckpt.load_into(store, {"model": other.model}, step=63)
    assert restored.step == 63
    assert all(other.bytes()[name] == seen[63][name] for name in other.model.state_dict())
    with pytest.raises(NoSnapshot, match="101: no such snapshot"):
        ckpt.load(store, step=101)


@pytest.mark.parametrize("to", ["mirror", "both"])
def test_records_in_the_mirrors_folder_outlive_the_process(to: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    job(store, Training(), 8, journal=ckpt.Journal(flush="1 step", to=to), mirror=str(tmp_path))
    keys = [entry.key for entry in store.list("journal/")]
    assert bool(keys) == (to == "both")
    store.delete(keys)
    second = Training(seed=7)
    saver = job(store, second, 12, journal=ckpt.Journal(flush="1 step", to=to), mirror=str(tmp_path))
    assert saver.restored is not None and saver.restored.step == 8
    assert recording(second) == recording(unhurt(12))
    generations = {path.name.split("-")[2] for path in tmp_path.rglob("*.record")}
    assert generations == {"000002"}, "records of the run before have served, and are gone"


def test_a_clean_end_leaves_nothing_in_the_mirrors_folder(tmp_path: Path) -> None:
    training = Training()
    with ckpt.Checkpointer(
        MemoryStore(), training.state, every=5, journal=True, mirror=str(tmp_path), options=QUIET
    ) as saver:
        for step in range(saver.restore(), 7):
            training.train(step)
            saver.step(step + 1)
    assert not list(tmp_path.rglob("*.record"))


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    job(
        MemoryStore(), Training(), 12, every=100, mirror=str(tmp_path),
        journal=ckpt.Journal(flush="1 step", to="both", ring=40_000),
    )  # fmt: skip
    records = sorted(tmp_path.rglob("*.record"))
    assert records and sum(path.stat().st_size for path in records) <= 40_000
    assert records[-1].name.endswith("000000000012.record")


def test_a_ring_alone_that_is_too_small_says_so_and_the_journal_goes_on_from_the_next_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than promise what the ring has dropped already."""
    paused: list[str] = []
    training, store = Training(), MemoryStore()
    saver = ckpt.Checkpointer(
        store, training.state, every=20, mirror=str(tmp_path), options=QUIET,
        journal=ckpt.Journal(flush="1 step", to="mirror", ring=60_000),
    )  # fmt: skip
    with killed(), saver:
        for step in range(saver.restore(), 22):
            training.train(step)
            saver.step(step + 1)
            if step + 1 in (19, 22):
                paused.append(str(saver.stats.journal and saver.stats.journal.off))
        raise Killed
    assert ["give Journal(ring=) more" in why for why in paused] == [True, False]
    assert "the ring does not hold the steps between two snapshots" in caplog.text
    second = Training(seed=7)
    again = job(store, second, 23, journal=ckpt.Journal(flush="1 step", to="mirror"), mirror=str(tmp_path))
    assert again.restored is not None and again.restored.step == 22


def test_records_that_wait_for_a_store_that_is_down_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "BEHIND", 100_000)
    store = GateStore(MemoryStore(), where=lambda key: key.startswith("journal/"))
    training = Training()
    saver = ckpt.Checkpointer(
        store, training.state, every=1000, options=QUIET, mirror="off", journal=ckpt.Journal(flush="10s", to="store")
    )
    with killed(), saver:
        for step in range(saver.restore(), 60):
            training.train(step)
            saver.step(step + 1)
        stats = saver.stats.journal
        assert stats is not None and stats.off is not None and "wait for the store" in stats.off
        assert saver._journal is not None and saver._journal._keeper.segments is not None
        assert saver._journal._keeper.segments.held <= 100_000
        store.gate.set()
        raise Killed


def test_a_step_that_is_saved_once_more_interrupts_nothing() -> None:
    store, training = MemoryStore(), Training()
    saver = ckpt.Checkpointer(store, training.state, every=5, journal=EVERY_STEP, mirror="off", options=QUIET)
    with killed(), saver:
        for step in range(saver.restore(), 9):
            training.train(step)
            saver.step(step + 1)
            if step + 1 in (5, 7):
                saver.save(step + 1).wait(60)  # 5 is saved already; 7 was not due
        assert saver.stats.journal is not None and saver.stats.journal.off is None
        raise Killed
    assert sorted(id_.step for id_ in read_history(store).snapshots) == [0, 5, 7]
    for step in range(1, 10):
        assert ckpt.load(store, step=step), step


def test_without_a_journal_nothing_of_it_is_written(tmp_path: Path) -> None:
    store, training = MemoryStore(), Training()
    saver = job(store, training, 7, journal=False, mirror=str(tmp_path))
    assert saver.stats.journal is None
    assert not list(store.list("journal/")) and not list(tmp_path.rglob("*.record"))
    assert not training.optimizer._optimizer_step_pre_hooks
    assert [id_.step for id_ in read_history(store).snapshots] == [5]


def test_a_journal_that_is_off_now_still_stands_for_load_and_not_for_restore() -> None:
    store = MemoryStore()
    job(store, Training(), 8)
    saver = job(store, Training(), 8, journal=False)
    assert saver.restored is not None and saver.restored.step == 5


def test_accumulation_skipped_steps_and_frozen_parameters_are_right() -> None:
    class Odd(Training):
        def train(self, step: int) -> float:
            for micro in range(2):
                x = torch.randn(12, 8, generator=torch.Generator().manual_seed(10 * step + micro))
                self.model(x).square().mean().backward()
            if step == 3:
                self.model.inp.weight.requires_grad_(False)
            if step == 6:
                self.model.inp.weight.requires_grad_(True)
            if step != 4:  # as a scaler skips it that found an overflow
                self.optimizer.step()
            if step % 2:
                self.optimizer.step()  # and once more: two calls in one step
            self.optimizer.zero_grad()
            self.schedule.step()
            return 0.0

    comes_back(Odd, 9, 9, every=20)


def test_averages_several_optimizers_and_values_are_recorded() -> None:
    class Rich(Training):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.average = torch.optim.swa_utils.AveragedModel(self.model)
            self.second = torch.optim.SGD(self.model.out.parameters(), lr=0.01, momentum=0.5)
            self.counts: dict[str, Any] = {"seen": 0, "history": [], "table": torch.zeros(3)}

        @property
        def state(self) -> dict[str, object]:
            return {**super().state, "average": self.average, "second": self.second, "counts": self.counts}

        def train(self, step: int) -> float:
            loss = super().train(step)
            self.second.step()
            self.average.update_parameters(self.model)
            self.counts["seen"] += 12
            self.counts["history"].append(step)
            self.counts["table"][step % 3] += 1
            return loss

        def bytes(self) -> dict[str, bytes]:
            found = super().bytes()
            found |= {f"average.{n}": t.numpy().tobytes() for n, t in self.average.state_dict().items()}
            return found | {"counts": repr(self.counts).encode()}

    comes_back(Rich, 9, 9)


def test_a_damaged_newest_snapshot_is_replayed_past() -> None:
    store = MemoryStore()
    job(store, Training(), 8)
    pack = max(entry.key for entry in store.list("packs/"))
    assert "000000000005" in pack
    flipped(store, pack, 4000)
    again = Training(seed=6)
    saver = job(store, again, 8)
    assert saver.restored is not None and (saver.restored.id.step, saver.restored.step) == (0, 8)
    assert recording(again) == recording(unhurt(8))


def test_a_flip_in_any_segment_is_told_and_what_lies_before_it_is_restored() -> None:
    whole = MemoryStore()
    job(whole, Training(), 9)
    keys = [entry.key for entry in whole.list("journal/")]
    assert len(keys) == 9
    states = {step: unhurt(step).bytes() for step in range(5, 10)}
    for n, key in enumerate(keys):
        store = MemoryStore()
        for entry in whole.list(""):
            store.put(entry.key, whole.get(entry.key))
        flipped(store, key, 8 * (len(store.get(key)) * (n + 1) // 11) + n % 8)
        again = Training(seed=6)
        saver = ckpt.Checkpointer(store, again.state, mirror="off", journal=EVERY_STEP, options=QUIET)
        expected = 9 if n < 5 else n  # segments up to the snapshot of step 5 are not needed
        assert saver.restore() == expected
        assert again.bytes() == states[expected]
        saver.close()


def test_what_cannot_be_journaled_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(
        UnsupportedState, match=r"optimizer: torch\.optim\.lbfgs\.LBFGS cannot be journaled: its step\(\) calls"
    ):
        ckpt.Checkpointer(MemoryStore(), {"model": model, "optimizer": lbfgs}, journal=True, mirror="off")

    class Noisy(torch.optim.SGD):
        pass

    for kind in (Noisy, torch.optim.Adafactor):
        with pytest.raises(UnsupportedState, match="cannot be journaled: its step may look across shards"):
            state = {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}
            ckpt.Checkpointer(MemoryStore(), state, journal=True, mirror="off")
    with pytest.raises(ValueError, match="needs a mirror's folder"):
        ckpt.Checkpointer(MemoryStore(), {"model": model}, journal=ckpt.Journal(to="mirror"), mirror="off")


def test_a_closure_pauses_the_journal_until_the_next_snapshot() -> None:
    store, training = MemoryStore(), Training()

    def each(step: int) -> None:
        if step == 7:
            training.optimizer.step(lambda: 0.0)

    job(store, training, 9, each=each)
    again = Training(seed=6)
    saver = job(store, again, 9, journal=EVERY_STEP)
    assert saver.restored is not None and saver.restored.step == 6


def test_statistics_tell_what_the_journal_took() -> None:
    store, training = MemoryStore(), Training()
    saver = job(store, training, 12)
    stats = saver.stats.journal
    assert stats is not None and stats.steps == 12 and stats.off is None
    records = sum(entry.size for entry in store.list("journal/"))
    assert 0 < stats.bytes <= records and stats.memory > 0 and stats.seconds > 0 and stats.cpu > 0
    with ckpt.Checkpointer(MemoryStore(), training.state, journal=True, mirror="off", options=QUIET) as other:
        other.restore()
        ticket = other.save(3)
        ticket.wait(20)
    assert ticket.report is not None and ticket.report.journal is not None


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_that_skips_is_replayed_skipping(fused: bool) -> None:
    """A fused optimizer is called in any case, and unscales and skips by itself."""

    class Scaled(Training):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        @property
        def state(self) -> dict[str, object]:
            return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

        def train(self, step: int) -> float:
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean() * (float("inf") if step in (6, 7) else 1.0)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()

    comes_back(Scaled, 9, 10)


def test_every_second_step_is_one_to_come_back_to() -> None:
    store = MemoryStore()
    journal = ckpt.Journal(every=2, flush="1 step", to="store")
    job(store, Training(), 9, journal=journal)
    assert [int(e.key[-20:-8]) for e in store.list("journal/")] == [2, 4, 5, 6, 8], "and the snapshot's own step"
    again = Training(seed=6)
    saver = job(store, again, 12, journal=journal)
    assert saver.restored is not None and saver.restored.step == 8
    assert recording(again) == recording(unhurt(12))


def test_copies_that_overlap_with_training_and_the_decorated_loop_go_with_a_journal(tmp_path: Path) -> None:
    ended: list[int] = []

    @ckpt.checkpointed(
        tmp_path / "store", every=5, capture="overlap", journal=EVERY_STEP, mirror="off", options=QUIET
    )  # fmt: skip
    def train(run: ckpt.Run, training: Training, last: int) -> None:
        run.track(**training.state)
        for step in run.steps(20):
            if step == last:
                ended.append(step)
                raise ZeroDivisionError
            training.train(step)

    for seed, last in ((0, 8), (7, 13)):
        with pytest.raises(ZeroDivisionError):
            train(Training(seed=seed), last)
    again = Training(seed=1)
    train(again, 99)
    assert ended == [8, 13]
    assert recording(again) == recording(unhurt(20))


def test_steps_at_risk_are_as_many_as_was_asked_for() -> None:
    """With the store closed to records, as many steps pass as may be at risk; the next one waits."""
    gate = GateStore(MemoryStore(), verbs=frozenset({"put"}), where=lambda key: key.startswith("journal/"))
    training = Training()
    saver = ckpt.Checkpointer(
        gate, training.state, every=50, journal=ckpt.Journal(flush="3 steps", to="store"), mirror="off", options=QUIET
    )
    assert saver.restore() == 0
    passed: list[int] = []

    def loop() -> None:
        for step in range(5):
            training.train(step)
            saver.step(step + 1)
            passed.append(step + 1)

    thread = threading.Thread(target=loop)
    thread.start()
    gate.arrived.wait(20)
    thread.join(1.0)
    assert passed == [1, 2]
    gate.gate.set()
    thread.join(20)
    assert passed == [1, 2, 3, 4, 5]
    saver.close()


def test_an_average_kept_through_data_is_recorded() -> None:
    """No version counter sees it; what no optimizer owns a part of is looked at."""

    class Averaged(Training):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed, width=600)
            self.average = Training(seed, width=600).model

        @property
        def state(self) -> dict[str, object]:
            return {**super().state, "average": self.average}

        def train(self, step: int) -> float:
            loss = super().train(step)
            for mean, live in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(live.data, alpha=0.1)
            return loss

        def bytes(self) -> dict[str, bytes]:
            return super().bytes() | {f"average.{n}": t.numpy().tobytes() for n, t in self.average.state_dict().items()}

    comes_back(Averaged, 7, 8)
