"""A web server for tests: files of a folder, with ranges, on this machine only."""

import http.server
import threading
import time
from pathlib import Path


class Web:
    """Serves a folder. ``ranges``: whether ranges are known; ``failures``: so many answers are 503."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges = True
        self.failures = 0
        self.requests: list[tuple[str, str | None]] = []
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                web.requests.append((self.path, wanted))
                if web.failures:
                    web.failures -= 1
                    return self.answer(503, b"")
                path = web.folder / self.path.lstrip("/")
                if not path.is_file():
                    return self.answer(404, b"")
                content = path.read_bytes()
                if wanted is None or not web.ranges:
                    return self.answer(200, content)
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                if int(first) >= len(content):
                    return self.answer(416, b"")
                part = content[int(first) : int(last) + 1]
                end = int(first) + len(part) - 1
                self.answer(206, part, {"Content-Range": f"bytes {first}-{end}/{len(content)}"})

            do_HEAD = do_GET

            def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """A client that went away is no matter."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}"

    def wait_for(self, ranges: int) -> None:
        """Until so many ranges were asked for."""
        for _ in range(500):
            if sum(r is not None for _, r in self.requests) >= ranges:
                return
            time.sleep(0.01)
        raise AssertionError(f"only {self.requests}")

    def __enter__(self) -> "Web":
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
