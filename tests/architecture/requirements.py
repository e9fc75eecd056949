"""Checks that each row of docs/requirements.md that is done has a test whose name begins with its id, in C++, Python or CMake.

    python requirements.py REPOSITORY    prints one line per row without a test; exit code 1 if there is any
"""

import os
import re
import sys

ROW = re.compile(r"^\| ([A-Z]+\d\d) \|.*\| ([^|]*) \|$", re.M)
# TEST(Suite, DDP07_accumulates), TEST_P(Suite, BEY05_BEY06_resumes); def test_PY01_collectives(); add_test(NAME Suite.SCA08_slurm ...):
# of a name, the ids that it begins with.
NAMES = {".cpp": re.compile(r"^\s*\w*TEST\w*\(\s*\w+,\s*(\w+)", re.M), ".py": re.compile(r"^def test_(\w+)", re.M),
         ".txt": re.compile(r"^\s*add_test\(NAME \w+\.(\w+)", re.M)}
IDS = re.compile(r"([A-Z]+\d\d)_")


def ids_in(name):
    """['BEY05', 'BEY06'] of 'BEY05_BEY06_resumes'."""
    found = []
    while match := IDS.match(name):
        found.append(match.group(1))
        name = name[match.end():]
    return found


def tested(root):
    """The ids with which tests' names begin."""
    found = set()
    for top in ("tests", os.path.join("python", "tests")):
        for folder, _, files in os.walk(os.path.join(root, top)):
            for file in files:
                pattern = NAMES.get(os.path.splitext(file)[1])
                if pattern is None:
                    continue
                with open(os.path.join(folder, file), encoding="utf-8") as f:
                    found.update(one for name in pattern.findall(f.read()) for one in ids_in(name))
    return found


def violations(root):
    with open(os.path.join(root, "docs", "requirements.md"), encoding="utf-8") as f:
        rows = dict(ROW.findall(f.read()))
    known = tested(root)
    without = ["%s is '%s' in docs/requirements.md, and no test's name begins with it" % (row, state)
               for row, state in sorted(rows.items()) if state.startswith("done") and row not in known]
    unknown = ["a test's name begins with %s, which is no row of docs/requirements.md" % row for row in sorted(known - set(rows))]
    return without + unknown


def main():
    found = violations(sys.argv[1])
    print("\n".join(found) or "every row that is done has a test")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
