"""Real S3 servers on loopback, and what stands between them and a client to break things.

All come as wheels from PyPI: SeaweedFS, moto's server (which keeps its data in memory), and `rclone serve s3`, which
answers ranges with 200 and so serves only those tests that are about something else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY, SECRET = "TIERFSTESTKEYID", "tierfs-test-secret-0123456789abcdef"
BUCKET = "tierfs-test"
READY_SECONDS = 60.0


def program(name: str) -> str | None:
    """A program from a wheel of this environment, or the machine's."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, and whose fellows 10000 higher nobody has: SeaweedFS uses those as well."""
    with contextlib.ExitStack() as held:

        def take(port: int) -> int:
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", port))
            return int(taken.getsockname()[1])

        found: list[int] = []
        while len(found) < count:
            port = take(0)
            with contextlib.suppress(OSError, OverflowError):
                take(port + 10000)
                found.append(port)
        return found


@dataclass
class Server:
    """A server that runs, or was killed and can be started again where it was."""

    command: list[str]
    port: int
    log: Path
    ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.log.parent
            )
        until = time.monotonic() + READY_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"{self.command[0]} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


def answers(url: str, method: str = "GET", accept: Container[int] = range(200, 500)) -> bool:
    """Whether something answers a request with such a status."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as reply:
            return reply.status in accept
    except urllib.error.HTTPError as error:
        with error:
            return error.code in accept
    except (OSError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def seaweedfs(where: Path) -> Iterator[Server]:
    """SeaweedFS with one bucket, its data below ``where``."""
    weed = program("weed")
    assert weed is not None
    where.mkdir(parents=True)
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    (where / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = free_ports(4)
    command = [weed, "-logtostderr=true", "server", f"-dir={where}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"]
    command += ["-s3", f"-s3.config={where / 's3.json'}", "-volume.max=40", "-master.volumeSizeLimitMB=1024"]
    command += ["-master.telemetry=false", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]

    def ready() -> bool:
        made = answers(f"http://127.0.0.1:{filer}/buckets/{BUCKET}/", "POST", (200, 201, 409))
        return made and answers(f"http://127.0.0.1:{s3}/")

    server = Server(command, s3, where / "log", ready)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        for port in (filer, s3, filer + 10000, s3 + 10000):
            for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def rclone_s3(where: Path) -> Iterator[Server]:
    """`rclone serve s3` over a directory, with one bucket."""
    rclone = program("rclone")
    assert rclone is not None
    (where / "data" / BUCKET).mkdir(parents=True)
    (where / "rclone.conf").touch()
    (port,) = free_ports(1)
    command = [rclone, "serve", "s3", str(where / "data"), f"--addr=127.0.0.1:{port}", f"--auth-key={KEY},{SECRET}"]
    command += [f"--config={where / 'rclone.conf'}", "--vfs-cache-mode=off"]
    server = Server(command, port, where / "log", lambda: answers(f"http://127.0.0.1:{port}/"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def moto(where: Path) -> Iterator[Server]:
    """moto's server, with one bucket. It looks at no credentials."""
    server_program = program("moto_server")
    assert server_program is not None
    where.mkdir(parents=True)
    (port,) = free_ports(1)
    server = Server(
        [server_program, "-H", "127.0.0.1", "-p", str(port)],
        port,
        where / "log",
        lambda: answers(f"http://127.0.0.1:{port}/{BUCKET}", "PUT"),
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()


SERVERS = {"seaweedfs": ("weed", seaweedfs), "moto": ("moto_server", moto)}
"""Those that are S3: name, program, how to run it."""


# what goes wrong


@dataclass(frozen=True)
class Asked:
    """A request, as it came."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.path


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Bytes of the body that are sent before the connection is broken off."""


def s3_error(status: int, code: str, extra: str = "") -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>{extra}</Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


Fault = Callable[[Asked], "Reply | None"]


class Between:
    """An HTTP server that hands requests on to another, unless ``fault`` answers. Keeps what was asked. A fault that
    raises ConnectionError breaks the connection off."""

    def __init__(self, upstream: Server | None = None) -> None:
        self.upstream = upstream
        self.fault: Fault = lambda asked: None
        self.spoil: Callable[[Asked, Reply], Reply] = lambda asked, reply: reply
        """What becomes of an answer on its way back."""
        self.asked: list[Asked] = []
        self.closing = threading.Event()
        """For faults that hang: set when this ends."""
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = Asked(
                    self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body
                )
                between.asked.append(asked)
                reply = between.fault(asked) or between.forward(asked)
                reply = between.spoil(asked, reply)
                self.send_response_only(reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = reply.headers.get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(reply.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body if reply.cut is None else reply.body[: reply.cut])
                if reply.cut is not None:
                    raise ConnectionResetError

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)  # type: ignore[arg-type]

        self._server = Listener(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forward(self, asked: Asked) -> Reply:
        if self.upstream is None:
            return Reply(404)
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream.port, timeout=30)
        try:
            connection.putrequest(asked.method, asked.path, skip_host=True, skip_accept_encoding=True)
            for name, value in asked.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(asked.body)
            reply = connection.getresponse()
            return Reply(reply.status, reply.read(), dict(reply.getheaders()))
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionResetError from error
        finally:
            connection.close()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def between(upstream: Server | None = None) -> Iterator[Between]:
    made = Between(upstream)
    try:
        yield made
    finally:
        made.close()
