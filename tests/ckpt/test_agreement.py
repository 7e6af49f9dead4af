from __future__ import annotations

import pytest

from ckpt import errors
from ckpt.agreement import on_first, pack_error, unpack_error


class Pair:
    """Two ranks in one process: what rank 0 broadcast is what rank 1 receives."""

    world_size = 2

    def __init__(self, rank: int, wire: list[bytes]) -> None:
        self.rank = rank
        self.wire = wire

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes:
        if data is not None:
            self.wire.append(data)
        return self.wire[-1]


def test_the_result_of_rank_0_reaches_every_rank() -> None:
    wire: list[bytes] = []
    assert on_first(Pair(0, wire), lambda: b"run 7") == b"run 7"
    assert on_first(Pair(1, wire), lambda: pytest.fail("only rank 0 acts")) == b"run 7"


def test_an_error_of_rank_0_is_raised_by_every_rank_with_its_fields() -> None:
    wire: list[bytes] = []

    def refuse() -> bytes:
        raise errors.StoreInUse("in use", run="000001-00000000", host="n3", pid=7, job=None, started=1.5)

    with pytest.raises(errors.StoreInUse):
        on_first(Pair(0, wire), refuse)
    with pytest.raises(errors.StoreInUse, match="rank 0: in use") as caught:
        on_first(Pair(1, wire), lambda: b"")
    assert (caught.value.host, caught.value.pid, caught.value.job, caught.value.started) == ("n3", 7, None, 1.5)


@pytest.mark.parametrize(
    "error",
    [
        errors.DamagedError("d", key="packs/x", step=3, rank=1, leaf="w", expected="a", found="b"),
        errors.LayoutMismatch("l", missing=("a",), unexpected=("b", "c"), changed={"w": "stored 3, live 4"}),
        errors.SaveFailed("s", step=4, stage="commit"),
        errors.Unavailable("u", store="s3://b", key="k", attempts=3, seconds=1.5),
        errors.NoSnapshot("n"),
    ],
)
def test_every_error_of_the_tree_survives_the_journey(error: Exception) -> None:
    again = unpack_error(pack_error(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_a_foreign_error_becomes_one_of_ours_that_names_it() -> None:
    again = unpack_error(pack_error(ZeroDivisionError("by zero")), where="rank 3: ")
    assert type(again) is errors.CheckpointError and str(again) == "rank 3: ZeroDivisionError: by zero"
