"""Builds the documentation's site and opens it as a reader does.

    python site_test.py REPOSITORY WORK [--pictures FOLDER]

MkDocs refuses links and headings that lead nowhere. Ends with code 77 (skipped) where MkDocs, Doxygen or Chromium is
missing.
"""

import argparse
import contextlib
import functools
import http.server
import os
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
import browser  # noqa: E402

SKIPPED = 77


def wait_until(window, expression, what):
    """The value of an expression that becomes true."""
    end = time.monotonic() + 20
    while not window.evaluate(expression):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return window.evaluate(expression)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """The address of a server of the folder, on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://127.0.0.1:%d" % server.server_address[1]
    finally:
        server.shutdown()


def look(window, site, pictures):
    for page, title, says, width in (
            ("index.html", "shoal", "You know from PyTorch", 1280),
            ("guides/fsdp.html", "FSDP", "summon_full_params", 1280),
            ("api/ddp.html", "shoal/ddp.h", "find_unused_parameters bool false", 1280),
            ("api/index.html", "API reference", "DistributedDataParallel: ", 1280),
            ("decentralized.html", "Decentralised", "neighbours", 480)):
        window.open(site + "/" + page, width)
        shown = window.evaluate("document.title + ' | ' + document.querySelector('h1').innerText")
        assert title in shown, (page, shown)
        assert says in " ".join(window.evaluate("document.body.innerText").split()), "%s does not say %s" % (page, says)
        faults = [text for text in window.complaints()
                  if not text.startswith(("asks for data:", "asks for " + site + "/"))]
        assert not faults, (page, faults)
        broken = window.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src).join(' ')")
        assert not broken, (page, broken)
        wide = window.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, "%s is %d pixels too wide for a window of %d" % (page, wide, width)
        if pictures:
            window.screenshot(os.path.join(pictures, page.replace("/", "_").replace(".html", ".png")))


def search(window, site, pictures):
    window.open(site + "/index.html", 1280)
    box = "document.querySelector('input.md-search__input')"
    assert window.evaluate("!!%s && %s.getBoundingClientRect().width > 50" % (box, box)), "there is no search box"
    window.evaluate("%s.focus(); %s.value = 'no_sync'; %s.dispatchEvent(new Event('input', {bubbles: true}));"
                    "%s.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));" % (box, box, box, box))
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')"
    found = wait_until(window, links, "the search finds nothing")
    assert "api/data_parallel.html" in found or "guides/ddp.html" in found, found
    if pictures:
        window.screenshot(os.path.join(pictures, "search.png"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("work", help="folder for the site")
    parser.add_argument("--pictures", help="folder for pictures of pages")
    arguments = parser.parse_args()
    program = browser.find()
    if program is None:
        print("skipped: no Chromium here to open the site with: apt-get install chromium")
        sys.exit(SKIPPED)
    build = os.path.join(arguments.root, "scripts", "docs", "build.py")
    built = subprocess.run([sys.executable, build, "--no-install", "--out", arguments.work], check=False)
    if built.returncode:
        sys.exit(built.returncode)
    for case in (look, search):
        with browser.Browser(program) as window, served(os.path.join(arguments.work, "site")) as site:
            case(window, site, arguments.pictures)
            print(case.__name__, "passed", flush=True)


if __name__ == "__main__":
    main()
