"""Every link of README and docs leads to a file of the repository, and to a heading that is there. Every source that
they name exists, and so does every message that the page for the person on call explains. Blocks of Python are Python.

    python links_test.py REPOSITORY
"""

import functools
import os
import posixpath
import re
import sys
import textwrap

import docs


def without_code(text):
    text = re.sub(r"^[ ]*```.*?^[ ]*```$", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(text):
    """As code hosting sites make them of headings."""
    found = {}
    for title in re.findall(r"^#+ (.*)$", re.sub(r"^[ ]*```.*?^[ ]*```$", "", text, flags=re.S | re.M), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name + ("-%d" % n if n else "") for name, count in found.items() for n in range(count + 1)}


def faults(root, pages, text_of):
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
            if re.match(r"(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            file = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            if path and not os.path.exists(os.path.join(root, file)):
                yield "%s: there is no %s" % (page, file)
            elif anchor and anchor not in anchors(text_of(file)):
                yield "%s: %s has no heading #%s" % (page, file, anchor)


def sources(root):
    for folder in ("bench", "cmake", "include", "scripts", "src", "tests"):
        for place, _, names in os.walk(os.path.join(root, folder)):
            for name in names:
                yield "/" + os.path.relpath(os.path.join(place, name), root)


def missing_sources(root, pages, text_of):
    known = set(sources(root))
    for page in pages:
        for name in re.findall(r"`([\w./-]+\.(?:cpp|h|cmake))`", text_of(page)):
            if "NAME" not in name and not any(path.endswith("/" + name) for path in known):
                yield "%s: there is no source %s" % (page, name)


def unknown_messages(root, page):
    """Messages in the first column of a table of which no part between numbers and names stands in the sources."""
    texts = []
    for name in sources(root):
        if name.startswith("/src/") and name.endswith((".cpp", ".h")):
            with open(root + name, encoding="utf-8") as file:
                texts.append(file.read())
    text = re.sub(r'"\s*\n\s*"', "", "".join(texts))
    for message in re.findall(r"^\| `([^`]*)`", page, re.M):
        parts = [part.strip() for part in re.split(r"\d+|\([^)]*\)|[;,]|\.\.\.", message)]
        if not any(part in text for part in parts if len(part.split()) > 1):
            yield "no source says: %s" % message


def wrong_python(blocks):
    for block in blocks:
        try:
            # Lines count as in the page.
            compile("\n" * (block.line - 1) + textwrap.dedent(block.code), block.page, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield "%s:%s: %s: %s" % (block.page, error.lineno, error.msg, (error.text or "").strip())


def faults_are_found(root):
    """A page with faults on purpose."""
    text = "# A `b` c!\n[a](#a-b-c) [b](README.md) [c](#gone) [d](gone.md) `[e](gone.md)`\n```sh\n[f](gone.md)\n```\n"
    found = list(faults(root, ["page"], lambda page: text if page == "page" else docs.text_of(root, page)))
    assert found == ["page: page has no heading #gone", "page: there is no gone.md"], found
    found = list(missing_sources(root, ["page"], lambda _: "`gone.cpp` `fsdp.h` `package/links_test.py` `NAME.h`"))
    assert found == ["page: there is no source gone.cpp"], found
    found = list(unknown_messages(root, "| `rank 2 has ended` |\n| `rank 2 has gone for a walk` |\n"))
    assert found == ["no source says: rank 2 has gone for a walk"], found
    found = list(wrong_python([docs.Block("page", 0, "python", "", 7, "  for x in y:\n    pass\n  for x y:\n")]))
    assert len(found) == 1 and found[0].startswith("page:9: invalid syntax"), found


def main():
    root = os.path.abspath(sys.argv[1])
    faults_are_found(root)
    pages = docs.pages(root)
    assert len(pages) > 20, pages
    found = list(faults(root, pages, functools.partial(docs.text_of, root)))
    pages.remove("CHANGELOG.md")  # names what there was
    found += missing_sources(root, pages, functools.partial(docs.text_of, root))
    found += unknown_messages(root, docs.text_of(root, "docs/guides/on_call.md"))
    python = [block for page in pages for block in docs.blocks(root, page, "python")]
    assert len(python) >= 5, python
    found += wrong_python(python)
    print("\n".join(found) or "%d pages: every link leads somewhere; %d blocks of Python" % (len(pages), len(python)))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
