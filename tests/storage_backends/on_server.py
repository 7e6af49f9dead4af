"""The contract on real servers, and what holds on every one of them that speaks HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from storage_backends.base import NotFound, Refused, Store, Unavailable
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.servers import Place, Proxy, Server
from tests.support.servers.fixture import Servers


class ServerContract(StoreContract):
    """Each test on a fresh place of the server that all tests share, without retries: they would hide faults."""

    kind: ClassVar[str]

    @pytest.fixture
    def server(self, servers: Servers) -> Server:
        return servers(self.kind)

    @pytest.fixture
    def place(self, server: Server) -> Place:
        return server.place()

    @pytest.fixture
    def opener(self, place: Place) -> Opener:
        return place.bare


class HttpServerContract(ServerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def proxy(cls, servers: Servers) -> Iterator[Proxy]:
        with servers.proxied(servers(cls.kind)) as proxy:
            yield proxy

    @pytest.fixture
    def counted(self, proxy: Proxy) -> Callable[[Callable[[], Any]], list[str]]:
        """The methods of the requests that a call makes, all of which must end well."""

        def count(call: Callable[[], Any]) -> list[str]:
            before = len(proxy.requests())
            call()
            return [request.method for request in proxy.requests()[before:]]

        return count

    def test_every_verb_is_one_request(self, proxy: Proxy, counted: Callable[[Callable[[], Any]], list[str]]) -> None:
        proxy.set()
        store = proxy.place().bare()
        assert counted(lambda: store.list("parts/")) == ["GET"], "an empty listing is no reason to look twice"
        assert counted(lambda: store.put("parts/1", b"1" * 5000)) == ["PUT"]
        # As large as a pack: no multipart upload, no question for the size.
        assert counted(lambda: store.put("parts/2", bytes(33 << 20))) == ["PUT"]
        assert counted(lambda: store.get("parts/1")) == ["GET"]
        assert counted(lambda: store.get_range("parts/2", 5, 9)) == ["GET"]
        assert counted(lambda: store.list("")) == ["GET"]
        assert counted(lambda: store.delete(["parts/1", "parts/2", "parts/3"])) == ["DELETE"] * 3

        def absent() -> None:
            with pytest.raises(NotFound):
                store.get("parts/1")

        assert counted(absent) == ["GET"]

    def test_what_fails_in_passing_is_said_at_once_and_repeated_by_nobody_below(
        self, proxy: Proxy, counted: Callable[[Callable[[], Any]], list[str]]
    ) -> None:
        """M5: retries are RetryingStore's alone, for those below it would multiply with them."""
        proxy.set()
        store = proxy.place().bare()
        store.put("a", b"12345")

        def fails(call: Callable[[], Any]) -> Callable[[], None]:
            def check() -> None:
                with pytest.raises(Unavailable, match=r"Slow|503|Unavailable"):
                    call()

            return check

        proxy.set(fail=1.0)
        assert counted(fails(lambda: store.put("a", b"new"))) == ["PUT"]
        assert counted(fails(lambda: store.get("a"))) == ["GET"]
        assert counted(fails(lambda: store.get_range("a", 1, 3))) == ["GET"]
        assert counted(fails(lambda: store.list(""))) == ["GET"]
        assert counted(fails(lambda: store.delete(["a"]))) == ["DELETE"]
        proxy.set()
        assert store.get("a") == b"12345"

    def test_a_server_that_takes_requests_and_says_nothing_is_given_up(self, proxy: Proxy) -> None:
        """A put too: aiohttp begins to time it only once its body has gone."""
        proxy.set()
        place = proxy.place()
        place.bare().put("a", b"12345")
        store = place.bare(patience=0.5)
        proxy.set(hole=True)
        for call in (
            lambda: store.put("a", b""),
            lambda: store.put("b", bytes(100_000)),
            lambda: store.get("a"),
            lambda: store.get_range("a", 1, 3),
            lambda: store.list(""),
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(Unavailable, match=r"(?i)time"):
                call()
        proxy.set()
        assert place.bare().get("a") == b"12345"

    def test_a_reset_is_worth_another_try(self, proxy: Proxy) -> None:
        proxy.set()
        store = proxy.place().bare()
        store.put("a", b"12345")
        proxy.set(reset=1.0)
        for call in (lambda: store.put("a", b""), lambda: store.get("a"), lambda: store.list("")):
            with pytest.raises(Unavailable):
                call()
        proxy.set()
        assert store.get("a") == b"12345"


def check_a_missing_bucket_is_refused(place: Place) -> None:
    """M3: a mistyped bucket is no empty store."""
    scheme, _, rest = place.url.partition("://")
    store: Store = Place(f"{scheme}://nothere/{rest.partition('/')[2]}", place.options).bare()
    for call in (
        lambda: store.list(""),
        lambda: store.list("runs/"),
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(Refused, match=r"bucket|container|No such file"):
            call()
