"""`shoal bench --html`, opened in a browser: what a reader sees is what was measured, and all of it can be read.

    python bench_page_test.py build/shoal [--pictures FOLDER]

Ends with code 77 (skipped) where there is no Chromium.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

import browser

SKIPPED = 77
WIDTHS = (1280, 800, 400)
LEAST_COPIED = 4096  # bytes; below, the plots do not show a copy

# Places of everything that a reader is to tell apart, in pixels of the page.
SEE = """(() => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const texts = e => [...e.querySelectorAll('text')].map(t => ({text: t.textContent, box: box(t)}));
  const titled = e => ({title: e.textContent.trim(), box: box(e)});
  return {
    title: document.title,
    width: document.documentElement.scrollWidth,
    room: document.documentElement.clientWidth,
    broken: document.querySelectorAll('parsererror').length,
    headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
    plots: [...document.querySelectorAll('svg')].map(svg => ({
      label: svg.getAttribute('aria-label'),
      box: box(svg),
      texts: texts(svg),
      lines: [...svg.querySelectorAll('polyline')].map(l => l.points.numberOfItems),
      backwards: [...svg.querySelectorAll('polyline')].some(l => [...l.points].some((p, i) => i && p.x < l.points[i - 1].x)),
      points: [...svg.querySelectorAll('circle')].map(titled),
      parts: [...svg.querySelectorAll('rect.part')].map(titled),
    })),
    rows: [...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent)),
    scrolled: [...document.querySelectorAll('.wide')].filter(c => c.scrollWidth > c.clientWidth).length,
    clipped: [...document.querySelectorAll('td, th')].filter(c => c.scrollWidth > c.clientWidth + 1).length,
  };
})()"""

# Stands in for the reference's peers.py, which a test cannot count on: the same options, a report of the same shape.
PEER = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--world"] == "2" and options["--model"] == "mlp" and options["--impl"] == "fused", options
json.dump({"timing": {"step_ms": [9, 9, 9, 2, 3, 4], "warm_up": 3, "median_ms": 3, "min_ms": 2},
           "memory": {"growth_mib": [7.5, 7.0]}}, open(options["--json"], "w"))
"""


def overlap(a, b, slack=0.5):
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


def inside(a, b, slack=1):
    return a[0] >= b[0] - slack and a[1] >= b[1] - slack and a[2] <= b[2] + slack and a[3] <= b[3] + slack


def unreadable(seen):
    """What keeps a reader from reading the page."""
    faults = []
    if seen["broken"]:
        faults.append("not well-formed")
    if seen["width"] > seen["room"]:
        faults.append(f"the page is {seen['width']} wide in a window of {seen['room']}")
    if seen["clipped"]:
        faults.append(f"{seen['clipped']} cells are clipped")
    for plot in seen["plots"]:
        texts = plot["texts"]
        if plot["backwards"]:
            faults.append(f"{plot['label']}: a line goes back")
        faults += [f"{plot['label']}: '{t['text']}' is outside" for t in texts if not inside(t["box"], plot["box"])]
        faults += [f"{plot['label']}: a mark is outside: {m['title']}" for m in plot["points"] + plot["parts"]
                   if not inside(m["box"], plot["box"])]
        faults += [f"{plot['label']}: '{a['text']}' overlaps '{b['text']}'" for i, a in enumerate(texts)
                   for b in texts[:i] if overlap(a["box"], b["box"])]
        faults += [f"{plot['label']}: '{t['text']}' lies on a bar" for t in texts for p in plot["parts"]
                   if overlap(t["box"], p["box"])]
    return faults


def look(window, page, name, pictures):
    """What a reader sees, at every width; readable at all of them."""
    for width in WIDTHS:
        window.open(page, width)
        seen = window.evaluate(SEE)
        if pictures:
            window.screenshot(os.path.join(pictures, f"{name}-{width}.png"))
        faults = unreadable(seen) + window.complaints()
        assert not faults, f"{name}, {width} pixels: {faults}"
        if width == WIDTHS[0]:
            widest = seen
            assert not seen["scrolled"], f"{name}: parts of it must be scrolled in a wide window"
    return widest


def bench(shoal, folder, *options):
    """Runs the bench; returns its JSON and the path of its page."""
    report, page = os.path.join(folder, "bench.json"), os.path.join(folder, "bench.html")
    done = subprocess.run([shoal, "bench", *options, "--json", report, "--html", page], capture_output=True, text=True,
                          timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(report, encoding="utf-8") as file:
        return json.load(file), page


def number(value, digits):
    return "–" if value is None else f"{value:.{digits}f}"


def size(count):
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def check_table(seen, rows):
    assert len(seen["rows"]) == 1 + len(rows), seen["rows"]
    for shown, expected in zip(seen["rows"][1:], rows):
        assert shown == expected, f"shown {shown}, measured {expected}"


def check_points(plot, figures, axis):
    """Every figure is a point, at a height that goes with the logarithm of its time."""
    key = "memcpy_us" if axis is None else "median_us"
    places = []
    for figure in figures:
        name = "one copy (memcpy)" if axis is None else axis(figure)
        mark = [p for p in plot["points"] if p["title"].startswith(f"{name}: {size(figure['bytes'])},")]
        assert len(mark) == 1, f"{plot['label']}: {len(mark)} points for {figure}"
        places.append((math.log(figure[key]), (mark[0]["box"][1] + mark[0]["box"][3]) / 2))
    return places


def check_line(places):
    """All places on one falling straight line: the axis is the one that the labels say."""
    (x0, y0), (x1, y1) = min(places), max(places)
    slope = (y1 - y0) / (x1 - x0)
    assert slope < -1, "larger times are higher"
    for x, y in places:
        assert abs(y0 + slope * (x - x0) - y) < 1, places


def collectives(shoal, window, folder, pictures):
    report, page = bench(shoal, folder, "--rounds", "2", "--ops", "all_reduce,all_gather,barrier", "--sizes",
                         "4,64K,128K,1M,1023K", "--dtypes", "float32,bfloat16")
    seen = look(window, page, "collectives", pictures)
    figures = report["collectives"]
    assert seen["title"] == "shoal bench"

    def name(figure):
        return figure["transport"] + (f", {figure['buffers']}" if figure["bytes"] else "")

    groups = {}
    for figure in figures:
        dtype = f", {figure['dtype']}" if figure["bytes"] else ""
        groups.setdefault(f"{figure['op']}{dtype}, {figure['ranks']} ranks", []).append(figure)
    assert seen["headings"] == [*groups, "All figures"]
    assert len(seen["plots"]) == len(groups)
    for plot, (heading, group) in zip(seen["plots"], groups.items()):
        assert plot["label"].startswith(heading + ": median time"), plot["label"]
        names = list(dict.fromkeys(map(name, group)))
        shown = [t["text"] for t in plot["texts"]]
        if group[0]["op"] == "barrier":
            bars = [p["title"] for p in plot["parts"]]
            assert bars == [f"{name(f)}: median: {f['median_us']:.4g} µs" for f in group], bars
            assert shown[::2] == names, shown
            continue
        assert shown[-len(names) - 1:] == [*names, "one copy (memcpy)"], shown
        sizes = {f["bytes"] for f in group}
        assert ("host, once" in names) == (group[0]["op"] == "all_gather"), names
        assert plot["lines"] == [len(sizes)] * len(names) + [len(sizes) - 1], plot["lines"]
        assert len(plot["points"]) == len(group) + len(sizes) - 1
        copies = list({f["bytes"]: f for f in reversed(group) if f["bytes"] >= LEAST_COPIED}.values())
        check_line(check_points(plot, group, name) + check_points(plot, copies, None))

    def faster(figure):
        same = [f for f in figures if f["transport"] == "gloo" and
                all(f[k] == figure[k] for k in ("op", "dtype", "bytes"))]
        return number(same[0]["median_us"] / figure["median_us"] if same else None, 2)

    check_table(seen, [[f["op"], f["dtype"], size(f["bytes"]), f["transport"], f["buffers"], number(f["min_us"], 1),
                        number(f["median_us"], 1), number(f["max_us"], 1), number(f.get("memcpy_us"), 1), faster(f),
                        number(f["wire_bytes"], 0)] for f in figures])


def one_size(shoal, window, folder, pictures):
    report, page = bench(shoal, folder, "--rounds", "1", "--ops", "all_reduce", "--sizes", "64K", "--ranks", "3")
    seen = look(window, page, "one-size", pictures)
    assert len(seen["plots"]) == 1 and not seen["plots"][0]["lines"]
    assert len(seen["plots"][0]["parts"]) == len(report["collectives"]) + 1, "and the copy"


def training(shoal, window, folder, pictures):
    peers = os.path.join(folder, "peers.py")
    with open(peers, "w", encoding="utf-8") as file:
        file.write(PEER)
    report, page = bench(shoal, folder, "--train", "--model", "mlp", "--steps", "6", "--rounds", "1", "--peer-python",
                         sys.executable, "--peer-script", peers, "--peer-impl", "fused")
    seen = look(window, page, "training", pictures)
    figures = report["train"]
    makers = ["shoal" if f["peer"] == "shoal" else "python" for f in figures]
    names = [f"{maker} {f['strategy']}" + ("" if f["transport"] == "none" else f" over {f['transport']}")
             for maker, f in zip(makers, figures)]
    assert names == ["shoal local", "shoal ddp over host", "shoal ddp over tcp", "shoal ddp over gloo",
                     "python local", "python ddp_view over gloo"], names
    assert seen["headings"] == ["Step time", "Memory per rank", "Bytes over TCP per step", "All figures"]
    times, memory, wire = seen["plots"]
    assert [t["text"] for t in times["texts"][:4]] == ["compute", "waiting for communication", "update", "other"]
    assert [t["text"] for t in memory["texts"][:4]] == ["parameters", "gradients", "optimizer state", "other"]
    assert [t["text"] for t in times["texts"][4::2]] == names
    assert [t["text"] for t in memory["texts"][4::2]] == names
    assert [t["text"] for t in wire["texts"][::2]] == names[:4], "peers do not know"
    shown = {p["title"]: p["box"][2] - p["box"][0] for p in times["parts"]}
    lengths = []
    for called, figure in zip(names, figures):
        for part, key in (("compute", "compute_ms"), ("waiting for communication", "exposed_comm_ms"),
                          ("update", "update_ms")):
            if figure[key]:
                title = f"{called}: {part}: {figure[key]:.4g} ms"
                assert title in shown, f"{title} is not among {list(shown)}"
                lengths.append((figure[key], shown[title]))
    longest = max(lengths)
    for value, length in lengths:
        assert abs(longest[1] * value / longest[0] - length) < 1, "lengths go with the figures"
    check_table(seen, [[maker, f["strategy"], f["transport"], *(number(f["step_ms"][k], 3)
                                                                for k in ("median", "min", "max")),
                        *(number(f[k], 3) for k in ("compute_ms", "exposed_comm_ms", "update_ms", "ratio_to_local")),
                        number(f["collectives_per_step"], 1), number(f["memory"]["growth"], 1),
                        number(f["memory"]["pss"], 1), number(f["wire_bytes_per_step"], 0)]
                       for maker, f in zip(makers, figures)])


def faults_are_found(_, window, folder, pictures):
    """A page with one fault of each kind: the checks above can fail."""
    page = os.path.join(folder, "faults.html")
    with open(page, "w", encoding="utf-8") as file:
        file.write("<title>t</title><script>console.error('planted'); undefined_name;</script><img src='missing.png'>"
                   "<div style='width: 3000px'>wide</div><svg width='200' height='60' aria-label='plot'>"
                   "<text x='10' y='20'>one</text><text x='12' y='22'>two</text><text x='190' y='40'>outside</text>"
                   "<rect class='part' x='0' y='10' width='30' height='20'><title>bar</title></rect>"
                   "<polyline points='1,1 3,3 2,4'/></svg>")
    window.open(page, WIDTHS[0])
    faults = " | ".join(unreadable(window.evaluate(SEE)) + window.complaints())
    for expected in ("the page is 3", "'two' overlaps 'one'", "'outside' is outside", "'one' lies on a bar", "goes back", "planted",
                     "Uncaught", "missing.png"):
        assert expected in faults, f"not found: {expected} in {faults}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shoal", help="the program")
    parser.add_argument("--pictures", help="folder for pictures of the pages")
    arguments = parser.parse_args()
    program = browser.find()
    if program is None:
        print("skipped: no Chromium here to open the page with: apt-get install chromium")
        sys.exit(SKIPPED)
    for case in (faults_are_found, collectives, one_size, training):
        with tempfile.TemporaryDirectory() as folder, browser.Browser(program) as window:
            case(arguments.shoal, window, folder, arguments.pictures)
            print(case.__name__, "passed", flush=True)


if __name__ == "__main__":
    main()
