"""Builds the documentation's site: README.md, docs/, bench/results.md and the API reference from the public headers.

    python scripts/docs/build.py [--out build/docs] [--no-install]

Makes .venv-docs with MkDocs and its theme (requirements.txt) unless it is there. Needs Doxygen.
"""

import argparse
import glob
import os
import posixpath
import re
import shutil
import subprocess
import sys
import venv

import api

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.join(ROOT, "scripts", "docs")
VENV = os.path.join(ROOT, ".venv-docs")
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
APPENDIX = "bench/results.md"
# Not for users: what they inherit from is.
HIDDEN = {"call", "local_optimizer", "optimizer_base", "range", "shoal"}


def missing(install):
    """What cannot be done without, in a sentence; empty: nothing."""
    if not shutil.which("doxygen"):
        return "Doxygen is not installed: apt-get install doxygen"
    if not install and not os.path.exists(os.path.join(VENV, "bin", "mkdocs")):
        return "there is no MkDocs in .venv-docs: `make docs` installs it"
    return ""


def install():
    stamp = os.path.join(VENV, "requirements.txt")
    wanted = os.path.join(HERE, "requirements.txt")
    if os.path.exists(stamp) and open(stamp, encoding="utf-8").read() == open(wanted, encoding="utf-8").read():
        return
    print("docs: about to make .venv-docs with MkDocs and its theme", flush=True)
    venv.create(VENV, with_pip=True, clear=True)
    subprocess.run([os.path.join(VENV, "bin", "pip"), "install", "--quiet", "-r", wanted], check=True)
    shutil.copy(wanted, stamp)


def site_path(path):
    """Where a file of the repository lies in the site; None: it is not part of it."""
    if path == "README.md":
        return "index.md"
    if path in ROOT_PAGES:
        return path
    if path == APPENDIX:
        return os.path.basename(path)
    if path.startswith("docs/") and os.path.isfile(os.path.join(ROOT, path)):
        return path.removeprefix("docs/")
    return None


def relinked(text, path):
    """Links to files as the site has them; those to files that it lacks become their names."""
    def link(match):
        before, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        there = site_path(file)
        if there:
            here = posixpath.dirname(site_path(path))
            return "%s[%s](%s%s)" % (before, label, posixpath.relpath(there, here), anchor)
        return label if "`" in label else "%s (`%s`)" % (label, file)
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def stage(pages):
    """Copies of the pages, as the site needs them."""
    sources = ["README.md", *ROOT_PAGES, APPENDIX] + [
        os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "docs", "**", "*"), recursive=True)
        if os.path.isfile(path)]
    for source in sources:
        target = os.path.join(pages, site_path(source))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not source.endswith(".md"):
            shutil.copy(os.path.join(ROOT, source), target)
            continue
        with open(os.path.join(ROOT, source), encoding="utf-8") as file:
            text = relinked(file.read(), source)
        # The theme's fences take the language alone.
        text = re.sub(r"^(\s*```[a-z]+) .*$", r"\1", text, flags=re.M)
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    shutil.copy(os.path.join(HERE, "site.css"), os.path.join(pages, "site.css"))


def list_decisions(pages):
    """docs/adr has no list of its own, so that a new page is one file."""
    lines = []
    for name in sorted(os.listdir(os.path.join(pages, "adr"))):
        with open(os.path.join(pages, "adr", name), encoding="utf-8") as page:
            number, title = re.match(r"# (\d+)\. (.*)", page.readline()).groups()
        lines.append("| %s | [%s](%s) |\n" % (number, title, name))
    with open(os.path.join(pages, "adr", "index.md"), "w", encoding="utf-8") as index:
        index.write("# Decisions\n\nWhat is not obvious, and why it is as it is.\n\n| | |\n| --- | --- |\n")
        index.writelines(lines)


def make_reference(out, pages):
    folder = os.path.join(ROOT, "include")
    headers = sorted(os.path.relpath(path, folder)
                     for path in glob.glob(os.path.join(folder, "shoal", "**", "*.h"), recursive=True))
    headers = [header for header in headers if os.path.basename(header).removesuffix(".h") not in HIDDEN]
    environment = dict(os.environ, SHOAL_ROOT=ROOT, SHOAL_DOCS=out, SHOAL_PYTHON=sys.executable)
    subprocess.run(["doxygen", os.path.join(HERE, "Doxyfile")], env=environment, check=True)
    api.write_pages(os.path.join(out, "doxygen", "xml"), headers, os.path.join(pages, "api"))
    listed = ""
    for header in headers:
        page = os.path.basename(header).removesuffix(".h") + ".md"
        listed += "| [`%s`](%s) | %s |\n" % (header, page, api.first_sentence(os.path.join(pages, "api", page)))
    with open(os.path.join(pages, "api", "index.md"), "w", encoding="utf-8") as page:
        page.write("# API reference\n\n`#include <shoal/shoal.h>` has all of it. Each header has a page, made from its "
                   "comments.\n\n| header | |\n| --- | --- |\n" + listed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "docs"), help="folder for the site")
    parser.add_argument("--no-install", action="store_true", help="end with 77 if something is missing")
    arguments = parser.parse_args()
    fault = missing(not arguments.no_install)
    if fault:
        print("docs: " + fault)
        sys.exit(77 if arguments.no_install else 1)
    if not arguments.no_install:
        install()
    out = os.path.abspath(arguments.out)
    pages = os.path.join(out, "pages")
    shutil.rmtree(pages, ignore_errors=True)
    os.makedirs(pages)
    stage(pages)
    list_decisions(pages)
    make_reference(out, pages)
    environment = dict(os.environ, NO_MKDOCS_2_WARNING="1", SHOAL_DOCS_PAGES=pages,
                       SHOAL_DOCS_SITE=os.path.join(out, "site"))
    # Not --quiet: strict counts only the warnings that it shows.
    command = [os.path.join(VENV, "bin", "mkdocs"), "build", "--strict", "--clean", "-f",
               os.path.join(HERE, "mkdocs.yml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit("docs: MkDocs refuses the pages\n" + done.stdout + done.stderr)
    site = os.path.join(out, "site")
    print("docs: open %s; for the search: python3 -m http.server -d %s" % (os.path.join(site, "index.html"), site))


if __name__ == "__main__":
    main()
