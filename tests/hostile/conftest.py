"""Everything is loaded before memory is measured: what a module takes is not what an attack takes."""

from __future__ import annotations

import pytest

import ckpt
from recovery.verify import verify
from storage_backends.memory import MemoryStore
from tests.hostile.forging import victim


@pytest.fixture(autouse=True, scope="session")
def loaded() -> None:
    store = MemoryStore()
    victim(store)
    assert ckpt.load(store)
    assert not list(verify(store, deep=True))
