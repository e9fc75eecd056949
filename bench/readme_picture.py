"""Draws the picture in README.md: step time and memory beside the peers, from bench/readme.json.

    python bench/readme_picture.py            # writes docs/images/step_and_memory.svg
    python bench/readme_picture.py --check    # fails if the picture is not that of the figures
"""

import argparse
import json
import os
import sys
from xml.sax.saxutils import escape

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(ROOT, "bench", "readme.json")
PICTURE = os.path.join(ROOT, "docs", "images", "step_and_memory.svg")

WIDTH, ROW, GAP = 860, 17, 10
NAMES, BAR = 290, 215  # where the first bars begin, and the length of the longest
COLUMNS = ((NAMES, "step_ms", "step, ms"), (NAMES + 280, "growth_mib", "memory, MiB"))
OURS, PEERS, TEXT, FAINT = "#1f6f8b", "#b9c4cb", "#22303a", "#6b7a85"


def text(x, y, content, size=12, anchor="start", weight="normal", fill=TEXT):
    return '<text x="%g" y="%g" font-size="%g" text-anchor="%s" font-weight="%s" fill="%s">%s</text>' % (
        x, y, size, anchor, weight, fill, escape(content))


def wrapped(words, width):
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += word + " "
    return [line.strip() for line in lines]


def drawn(figures):
    rows = [row for group in figures["groups"] for row in group["rows"]]
    parts = [text(16, 26, figures["title"], 15, weight="bold")]
    for x, _, title in COLUMNS:
        parts.append(text(x, 50, title, 12, weight="bold"))
    y = 62
    for group in figures["groups"]:
        parts.append(text(16, y + 12, group["name"], 12, weight="bold"))
        for row in group["rows"]:
            ours = row["by"] == "shoal"
            weight = "bold" if ours else "normal"
            parts.append(text(NAMES - 8, y + 12, row["by"] + " " + row["what"], 11, "end", weight))
            for x, key, _ in COLUMNS:
                length = BAR * row[key] / max(other[key] for other in rows)
                parts.append('<rect x="%g" y="%g" width="%.1f" height="%g" fill="%s"/>' % (
                    x, y + 2, length, ROW - 5, OURS if ours else PEERS))
                parts.append(text(x + length + 4, y + 12, str(row[key]), 11, "start", weight))
            y += ROW
        y += GAP
    for line in wrapped("%s; %s. %s." % (figures["date"], figures["machine"], figures["note"]), 140):
        parts.append(text(16, y + 10, line, 10.5, fill=FAINT))
        y += 15
    height = y + 8
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" '
            'font-family="system-ui, sans-serif" role="img">\n<title>%s</title>\n'
            '<rect width="100%%" height="100%%" fill="#ffffff"/>\n%s\n</svg>\n'
            % (WIDTH, height, WIDTH, height, escape(figures["title"]), "\n".join(parts)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    with open(FIGURES, encoding="utf-8") as file:
        picture = drawn(json.load(file))
    if not arguments.check:
        os.makedirs(os.path.dirname(PICTURE), exist_ok=True)
        with open(PICTURE, "w", encoding="utf-8") as file:
            file.write(picture)
        return
    with open(PICTURE, encoding="utf-8") as file:
        if file.read() != picture:
            sys.exit("docs/images/step_and_memory.svg is not what bench/readme.json says: run bench/readme_picture.py")
    print("the picture shows the figures")


if __name__ == "__main__":
    main()
