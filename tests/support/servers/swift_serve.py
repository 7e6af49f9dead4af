"""Run by the python of Swift's own environment: FOLDER rings NAME=PORT … | FOLDER serve NAME."""

from __future__ import annotations

import sys
from pathlib import Path

folder = Path(sys.argv[1])
conf = folder / "conf"

import swift.common.utils  # noqa: E402
import swift.common.utils.config  # noqa: E402

# Not in /etc. Both must be set before anything imports swift.common.storage_policy.
for module in (swift.common.utils, swift.common.utils.config):
    module.SWIFT_CONF_FILE = str(conf / "swift.conf")


def rings(servers: list[str]) -> None:
    """16 partitions, one copy, on the one disk."""
    from swift.common.ring import RingBuilder

    for server in servers:
        name, port = server.split("=")
        builder = RingBuilder(4, 1, 0)
        builder.add_dev(
            {
                "region": 1,
                "zone": 1,
                "weight": 1,
                "device": "d1",
                "ip": "127.0.0.1",
                "port": int(port),
                "replication_ip": "127.0.0.1",
                "replication_port": int(port),
            }
        )
        builder.rebalance(seed="1")
        builder.get_ring().save(str(conf / f"{name}.ring.gz"))


def serve(name: str) -> int:
    from swift.common.wsgi import run_wsgi
    from swift.obj import server

    more = {"global_conf_callback": server.global_conf_callback} if name == "object" else {}
    return run_wsgi(str(conf / f"{name}.conf"), f"{name}-server", verbose=True, **more)


if sys.argv[2] == "rings":
    rings(sys.argv[3:])
else:
    sys.exit(serve(sys.argv[3]))
