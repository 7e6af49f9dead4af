"""How each server is configured, started and reached. Data and files only: processes are the keeper's business."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from storage_backends import Store, open_store
from storage_backends.facts import PATIENCE
from storage_backends.fsspec_store import FsspecStore
from storage_backends.opening import DEADLINE
from tests.support.servers import install

HOST = "127.0.0.1"
BUCKET = "tests"
HERE = Path(__file__).parent

# Azurite's documented account, the same everywhere.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Place:
    """Where a store is: what a user would type. Plain data, so that a rank can be told."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, deadline: float = DEADLINE) -> Store:
        """As a user opens it: with retries."""
        return open_store(self.url, deadline=deadline, **self.options)

    def bare(self, patience: float = PATIENCE) -> Store:
        """Without retries: what the backend alone does."""
        return FsspecStore(self.url, self.options, patience=patience)

    def flags(self) -> list[str]:
        """For the command line."""
        return [word for name, value in self.options.items() for word in ("--storage-option", f"{name}={value}")]

    def below(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)

    def with_options(self, **more: Any) -> Place:
        return Place(self.url, {**self.options, **more})


class Recipe(Protocol):
    """One kind of server. `folder` is its own; `ports` are free, the first is the one that clients use."""

    ports: int

    @property
    def mode(self) -> str:
        """What a proxy before it has to understand: "http" or "tcp"."""

    def install(self) -> None:
        """Raises `NotInstallable`."""

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        """Write what its programs read; once, before the first start."""

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        """What to run, side by side; by the name of each log."""

    def probe(self, folder: Path, port: int) -> None:
        """Make the bucket that all places lie in; any exception means "not ready yet"."""

    def place(self, folder: Path, port: int, name: str) -> Place:
        """The place of this name, as seen through this port (a proxy's, perhaps)."""


class Swift:
    """OpenStack Swift with its S3 API: four processes of one node, one copy of everything."""

    ports = 4
    mode = "http"
    _key, _secret = "test:tester", "testing"
    _names = ("proxy", "account", "container", "object")

    def install(self) -> None:
        install.swift()

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        numbers = dict(zip(self._names, ports, strict=True))
        for name in ("conf", "disk/d1", "cache"):
            (folder / name).mkdir(parents=True)
        conf = folder / "conf"
        account, user = self._key.split(":")
        common = f"bind_ip = {HOST}\nworkers = 0\nuser = {getpass.getuser()}\nswift_dir = {conf}\nlog_level = WARNING\n"
        (conf / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_prefix = test\nswift_hash_path_suffix = test\n"
            "[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        for name in self._names[1:]:
            (conf / f"{name}.conf").write_text(
                f"[DEFAULT]\n{common}bind_port = {numbers[name]}\ndevices = {folder}/disk\nmount_check = false\n"
                f"fallocate_reserve = 0\n[pipeline:main]\npipeline = {name}-server\n[app:{name}-server]\n"
                f"use = egg:swift#{name}\nrecon_cache_path = {folder}/cache\nconn_timeout = 5\nnode_timeout = 60\n"
                "container_update_timeout = 60\n"
            )
        filters = ("catch_errors", "gatekeeper", "listing_formats", "copy", "slo", "dlo", "symlink")
        (conf / "proxy.conf").write_text(
            f"[DEFAULT]\n{common}bind_port = {numbers['proxy']}\n[pipeline:main]\n"
            "pipeline = catch_errors gatekeeper listing_formats s3api tempauth copy slo dlo symlink proxy-server\n"
            "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\nconn_timeout = 5\n"
            "node_timeout = 60\nrecoverable_node_timeout = 60\n[filter:s3api]\nuse = egg:swift#s3api\n"
            f"location = us-east-1\n[filter:tempauth]\nuse = egg:swift#tempauth\n"
            f"user_{account}_{user} = {self._secret} .admin\n"
            + "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in filters)
        )
        rings = [f"{name}={numbers[name]}" for name in self._names[1:]]
        subprocess.run([install.swift(), HERE / "swift_serve.py", folder, "rings", *rings], check=True)

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        serve = [str(install.swift()), str(HERE / "swift_serve.py"), str(folder), "serve"]
        return {name: [*serve, name] for name in self._names}

    def probe(self, folder: Path, port: int) -> None:
        _make_bucket(port, self._key, self._secret)

    def place(self, folder: Path, port: int, name: str) -> Place:
        return _s3(port, self._key, self._secret, name)


class SeaweedFS:
    """Master, volume server, filer and S3 gateway in one process."""

    ports = 8
    mode = "http"
    _key, _secret = "testkey", "testsecret"

    def install(self) -> None:
        install.seaweedfs()

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        (folder / "data").mkdir()
        credentials = [{"accessKey": self._key, "secretKey": self._secret}]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
        settings = {
            "dir": folder / "data", "ip": HOST, "ip.bind": HOST,
            "master.port": master, "master.port.grpc": master_grpc,
            "master.volumeSizeLimitMB": 64, "master.electionTimeout": "1s",
            "volume.port": volume, "volume.port.grpc": volume_grpc, "volume.preStopSeconds": 0, "volume.max": 50,
            "filer": "true", "filer.port": filer, "filer.port.grpc": filer_grpc,
            "s3": "true", "s3.port": s3, "s3.port.grpc": s3_grpc, "s3.port.iceberg": 0, "s3.port.lance": 0,
            "s3.config": folder / "s3.json", "s3.iam": "false",
        }  # fmt: skip
        flags = [f"-{name}={value}" for name, value in settings.items()]
        return {"weed": [str(install.seaweedfs()), "-logtostderr=true", "server", *flags]}

    def probe(self, folder: Path, port: int) -> None:
        _make_bucket(port, self._key, self._secret)

    def place(self, folder: Path, port: int, name: str) -> Place:
        return _s3(port, self._key, self._secret, name)


class Sftp:
    """Debian's sshd with keys and a configuration of its own, for SFTP alone."""

    ports = 1
    mode = "tcp"

    def install(self) -> None:
        install.sshd()

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        folder.chmod(0o700)
        (folder / "data").mkdir()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "user.pub").rename(folder / "authorized_keys")
        if os.geteuid() == 0:
            # For sshd's separation of privileges; systemd makes it otherwise.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (folder / "sshd_config").write_text(
            f"ListenAddress {HOST}\nPort {ports[0]}\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nUseDNS no\nMaxStartups 100\n"
            f"MaxSessions 100\nSubsystem sftp internal-sftp\nForceCommand internal-sftp -d {folder}/data\n"
        )

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        return {"sshd": [install.sshd(), "-D", "-e", "-f", str(folder / "sshd_config")]}

    def probe(self, folder: Path, port: int) -> None:
        import paramiko

        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        with client:
            client.connect(HOST, port, getpass.getuser(), key_filename=str(folder / "user"), timeout=5)
            client.open_sftp().close()

    def place(self, folder: Path, port: int, name: str) -> Place:
        url = f"sftp://{getpass.getuser()}@{HOST}:{port}{folder}/data/{name}"
        return Place(url, {"key_filename": str(folder / "user")})


class Azurite:
    """The emulator of Azure Blob. Its table of contents reaches the disk every few seconds only: killed, it forgets."""

    ports = 1
    mode = "http"

    def install(self) -> None:
        install.azurite()

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        (folder / "data").mkdir()

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        flags = ["--blobHost", HOST, "--blobPort", str(ports[0]), "--location", str(folder / "data")]
        quiet = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return {"azurite": [*install.azurite(), *flags, *quiet]}

    def probe(self, folder: Path, port: int) -> None:
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        options: dict[str, Any] = {"retry_total": 0, "connection_timeout": 5, "read_timeout": 5}
        with BlobServiceClient.from_connection_string(_azure(port), **options) as client:
            try:
                client.create_container(BUCKET)
            except ResourceExistsError:
                return

    def place(self, folder: Path, port: int, name: str) -> Place:
        return Place(f"abfs://{BUCKET}/{name}", {"connection_string": _azure(port)})


@dataclass(frozen=True)
class HaProxy:
    """A proxy before another server, whose faults are read anew from ``FOLDER/faults`` for each request."""

    upstream: int
    mode: str
    seed: int
    ports = 1

    def install(self) -> None:
        install.haproxy()

    def configure(self, folder: Path, ports: Sequence[int]) -> None:
        (folder / "requests").touch()

    def commands(self, folder: Path, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        values = {"FOLDER": folder, "PORT": ports[0], "UPSTREAM": self.upstream, "SEED": self.seed, "HERE": HERE}
        environment = [f"PROXY_{name}={value}" for name, value in values.items()]
        # -W no, -db: in the foreground, one process.
        return {"haproxy": ["env", *environment, install.haproxy(), "-db", "-f", str(HERE / f"proxy_{self.mode}.cfg")]}

    def probe(self, folder: Path, port: int) -> None:
        import socket

        with socket.create_connection((HOST, port), timeout=5):
            return

    def place(self, folder: Path, port: int, name: str) -> Place:
        raise TypeError("a proxy has no places of its own; ask Proxy.place()")


KINDS: Mapping[str, Callable[[], Recipe]] = {
    "swift": Swift, "seaweedfs": SeaweedFS, "sftp": Sftp, "azurite": Azurite
}  # fmt: skip


def _s3(port: int, key: str, secret: str, name: str) -> Place:
    options = {"key": key, "secret": secret, "endpoint_url": f"http://{HOST}:{port}"}
    return Place(f"s3://{BUCKET}/{name}", options)


def _azure(port: int) -> str:
    endpoint = f"http://{HOST}:{port}/{_AZURE_ACCOUNT}"
    return (
        f"DefaultEndpointsProtocol=http;AccountName={_AZURE_ACCOUNT};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint};"
    )


def _make_bucket(port: int, key: str, secret: str) -> None:
    """Makes the bucket and writes into it: a front door that answers has not always a server behind it."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1})
    client = Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=f"http://{HOST}:{port}", aws_access_key_id=key,
        aws_secret_access_key=secret, config=config,
    )  # fmt: skip
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):  # after a restart
        client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="probe", Body=b"x")
    client.delete_object(Bucket=BUCKET, Key="probe")
