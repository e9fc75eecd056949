"""Builds the documentation's site and opens it as a reader does.

    python site_test.py REPOSITORY WORK [--pictures FOLDER]

MkDocs refuses links and headings that lead nowhere; here a browser shows every page, and searches. Ends with code 77 (skipped) where MkDocs, Doxygen or Chromium is
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


class WithoutSearch(Quiet):
    """The index of the search has no page. Every page makes one of it, which takes most of its time."""

    def do_GET(self):
        if not self.path.endswith("/search_index.json"):
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}}, "docs": []}')


@contextlib.contextmanager
def served(folder, handler):
    """The address of a server of the folder, on loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://127.0.0.1:%d" % server.server_address[1]
    finally:
        server.shutdown()


# What some of the pages must show: part of the title, part of the text.
SHOWN = {"index.html": ("shoal", "You know from PyTorch"), "guides/fsdp.html": ("FSDP", "summon_full_params"),
         "api/ddp.html": ("shoal/ddp.h", "find_unused_parameters bool false"),
         "api/index.html": ("API reference", "DistributedDataParallel: "), "decentralized.html": ("Decentralised", "neighbours"),
         "results.html": ("Results of measurements", "x shoal local"), "python.html": ("Python", "init_process_group")}
# The widths of windows, in pixels: a screen's and a telephone's.
WIDTHS = (1280, 480)
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def pages_of(site):
    """Paths of all pages of the site, but for the one that a server shows in place of one that is missing."""
    found = sorted(os.path.relpath(os.path.join(place, name), site)
                   for place, _, names in os.walk(site) for name in names if name.endswith(".html"))
    found.remove("404.html")
    missing = {*SHOWN, "guides/ddp.html", "adr/index.html", "CHANGELOG.html"} - {*found}
    assert not missing and len(found) > 80, (missing, found)
    return found


def look_at(window, site, page, pictures):
    window.open(site + "/" + page, WIDTHS[0])
    title, text = SHOWN.get(page, ("", ""))
    shown, body = window.evaluate("[document.title + ' | ' + document.querySelector('h1').innerText, document.body.innerText]")
    assert title in shown and shown.split(" | ")[-1].strip(), (page, shown)
    assert text in " ".join(body.split()), "%s does not say %s" % (page, text)
    faults = [each for each in window.complaints() if not each.startswith(("asks for data:", "asks for " + site + "/"))]
    assert not faults, (page, faults)
    broken = window.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src).join(' ')")
    assert not broken, (page, broken)
    for width in WIDTHS:
        window.resize(width)
        wide = window.evaluate(TOO_WIDE)
        assert wide <= 0, "%s is %d pixels too wide for a window of %d" % (page, wide, width)
    if pictures and page in SHOWN:
        window.screenshot(os.path.join(pictures, page.replace("/", "_").replace(".html", ".png")))


def faults_are_found(window, site, folder):
    """Pages with faults on purpose, after one without."""
    for name, body, told in (("none", "<h1>a</h1>", None), ("wide", "<h1>a</h1><div style='width: 900px'>b</div>", "too wide"),
                             ("picture", "<h1>a</h1><img src='gone.png'>", "404"), ("title", "<h1> </h1>", "fault_title"),
                             ("error", "<h1>a</h1><script>gone()</script>", "Uncaught")):
        path = os.path.join(folder, "fault_%s.html" % name)
        with open(path, "w", encoding="utf-8") as file:
            file.write("<!DOCTYPE html><link rel='icon' href='data:,'>" + body)  # else a browser asks for one that is missing
        try:
            look_at(window, site, os.path.basename(path), None)
        except AssertionError as error:
            if told is not None and told in str(error):
                continue
            raise
        finally:
            os.remove(path)
        if told is not None:
            sys.exit("failed: the fault of a page was not found: " + name)


def look(window, site, folder, pictures):
    pages = pages_of(folder)
    faults_are_found(window, site, folder)
    for page in pages:
        look_at(window, site, page, pictures)
    print("%d pages opened" % len(pages))


def search(window, site, _folder, pictures):
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
    folder = os.path.join(arguments.work, "site")
    with browser.Browser(program, limit_seconds=240) as window:
        for case, handler in ((look, WithoutSearch), (search, Quiet)):
            with served(folder, handler) as site:
                case(window, site, folder, arguments.pictures)
            print(case.__name__, "passed", flush=True)


if __name__ == "__main__":
    main()
