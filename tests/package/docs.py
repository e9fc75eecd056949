"""The pages that users read, and the code blocks in them."""

import collections
import glob
import os
import re

# language: "cpp", "sh", ...; note: what follows it; line: of the first line of code, from 1.
Block = collections.namedtuple("Block", "page number language note line code")


def pages(root):
    """Paths relative to the repository."""
    found = [path for place in ("*.md", "bench/*.md", "docs/**/*.md")
             for path in glob.glob(os.path.join(root, place), recursive=True)]
    return sorted(os.path.relpath(path, root) for path in found)


def text_of(root, page):
    with open(os.path.join(root, page), encoding="utf-8") as file:
        return file.read()


def blocks(root, page, language):
    """Numbered from 0 for each page and language."""
    text = text_of(root, page)
    found = list(re.finditer(r"^[ ]*```%s\b[ ]*([^\n]*)\n(.*?)^[ ]*```$" % language, text, re.S | re.M))
    return [Block(page, number, language, match[1].strip(), text.count("\n", 0, match.start(2)) + 1, match[2])
            for number, match in enumerate(found)]
