"""A headless Chromium that is spoken to through pipes: no network, no driver, nothing added to the pages it shows."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading


def find():
    """The program's path, or None."""
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    return next(filter(None, found), None)


class Browser:
    """Context manager; the browser, all its processes and its profile are gone when the block ends."""

    def __init__(self, program, limit_seconds=90):
        self.program = program
        self.limit_seconds = limit_seconds
        self.number = 0
        self.received = b""
        self.events = []

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        read_commands, write_commands = os.pipe()
        read_answers, write_answers = os.pipe()
        line = (f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "sh", self.program, "--headless", "--no-sandbox",
                "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
                "--disable-component-update", "--disable-background-networking", "--no-first-run", "--mute-audio",
                f"--user-data-dir={self.profile.name}")
        # A home of its own as well, since some of its helpers write there.
        environment = dict(os.environ, HOME=self.profile.name)
        self.process = subprocess.Popen(("bash", "-c", *line), pass_fds=(read_commands, write_answers), env=environment,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(read_commands)
        os.close(write_answers)
        self.commands = write_commands
        self.answers = read_answers
        # A browser that hangs is ended, which ends the read of its answer.
        self.guard = threading.Timer(self.limit_seconds, self.kill)
        self.guard.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        return self

    def __exit__(self, *_):
        self.guard.cancel()
        self.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def receive(self):
        while b"\0" not in self.received:
            some = os.read(self.answers, 1 << 16)
            if not some:
                raise RuntimeError("the browser has ended")
            self.received += some
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if hasattr(self, "session"):
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def open(self, path, width, height=900):
        """Shows a file or an address in a window of this size and waits until it is complete."""
        self.events.clear()
        self.resize(width, height)
        answer = self.call("Page.navigate", url=path if "://" in path else "file://" + os.path.abspath(path))
        if "errorText" in answer:
            raise RuntimeError(f"{path}: {answer['errorText']}")
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"]["value"]

    def complaints(self):
        """What the console shows since the page was opened, and requests for anything but the page."""
        texts = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                texts.append(parameters["exceptionDetails"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                texts.append("console: " + str(parameters["args"]))
            elif event.get("method") == "Log.entryAdded":
                texts.append(parameters["entry"]["text"])
            elif event.get("method") == "Network.requestWillBeSent" and parameters.get("type") != "Document":
                texts.append("asks for " + parameters["request"]["url"])
        return texts

    def screenshot(self, path):
        """A picture of the whole page, as a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        self.resize(int(size["width"]), int(size["height"]))
        picture = self.call("Page.captureScreenshot")
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))
