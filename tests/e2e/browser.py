"""Debian's Chromium without a screen, driven over a pipe: opens a page, points, measures, and takes its picture."""

import base64
import fcntl
import itertools
import json
import os
import select
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = Path("/usr/bin/chromium")
_MOST_SECONDS = 60
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe --disable-dev-shm-usage"
)


class Browser:
    """One tab, with what its console has said.

    Args:
        write: descriptor of what the browser reads: messages of its DevTools protocol, a zero byte after each.
        read: descriptor of what it writes.
    """

    def __init__(self, write, read):
        self._write, self._read, self._rest, self._numbers = write, read, b"", itertools.count(1)
        self.said = []
        """Errors and warnings."""
        self.requested = []
        """Addresses."""
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and give its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._until(lambda found: found.get("id") == number)["result"]

    def _until(self, fits):
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                found = json.loads(line)
                self._note(found)
                assert "error" not in found, found
                if fits(found):
                    return found
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            content = os.read(self._read, 1 << 20) if ready else b""
            assert content, "the browser does not answer"
            self._rest += content

    def _note(self, message):
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"]["text"])
        elif message.get("method") == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(str(params["args"]))

    def open(self, url, *, width=1200, height=900, is_dark=False):
        """Open a page, as wide as asked."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression):
        """Give the value of a JavaScript expression; of a promise, once it is kept."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression):
        """Wait until it is true."""
        deadline = time.monotonic() + _MOST_SECONDS
        while not self.ask(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def point(self, x, y):
        """Move the mouse there, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path=None, *, is_whole=True):
        """Give a PNG of the page, or of what the window shows."""
        content = base64.b64decode(
            self.call(
                "Page.captureScreenshot",
                format="png",
                captureBeyondViewport=is_whole,
                **(
                    {
                        "clip": self.ask(
                            "({x: 0, y: 0, width: innerWidth, height: document.documentElement.scrollHeight, scale: 1})"
                        )
                    }
                    if is_whole
                    else {}
                ),
            )["data"]
        )
        if path is not None:
            Path(path).write_bytes(content)
        return content


@contextmanager
def browsing():
    """Start a browser, and end it."""
    to_browser, from_browser = os.pipe(), os.pipe()
    # Out of the way of 3 and 4, where the browser looks for them.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (to_browser[0], from_browser[1])]
    for fd in (to_browser[0], from_browser[1]):
        os.close(fd)

    def place():
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={folder}"],
            close_fds=False,
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in theirs:
            os.close(fd)
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
