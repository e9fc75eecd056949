"""Plants each kind of violation in a copy of the sources and expects check.py to find exactly it."""

import os
import shutil
import sys
import tempfile

import check
import lengths
import requirements

PLANTED = [
    ("src/layout/flat_layout.cpp", '#include "shoal/group.h"\n', "upward include"),
    ("src/layout/slice.h", '#include "layout/flat_layout.h"\n', "include cycle"),
    ("src/engine/buckets/bucket.cpp", '#include "engine/reducer/step.h"\n',
     "cycle of folders: buckets -> reducer -> buckets (src/engine/buckets/bucket.cpp includes src/engine/reducer/step.h, "),
    ("src/engine/buckets/bucket.cpp", "using c10d::Store;\n", "c10d outside comm/"),
    ("src/strategy/ddp/ddp.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>\n", "c10d outside comm/"),
    ("src/comm/rendezvous/world.cpp", 'auto x = std::getenv("X");\n', "getenv outside"),
    ("src/comm/rendezvous/world.cpp", "#include <gloo/context.h>\n", "Gloo outside"),
    ("src/launch/limits.cpp", "using Time = std::chrono::steady_clock;\n", "another name for the clock"),
    ("src/comm/rendezvous/world.cpp", "#include <mpi.h>\n", "MPI outside"),
    ("src/strategy/ddp/ddp.cpp", "int size = MPI_Comm_size(0, 0);\n", "MPI outside"),
    ("include/shoal/group.h", '#include "comm/transport/transport.h"\n', "a public header includes"),
    ("src/models/hash.h", '#include "shoal/ddp.h"\n', "upward include"),
    ("src/strategy/other.cpp", '#include "shoal/ddp.h"\n', "a strategy includes another"),
    ("src/strategy/other/part.cpp", '#include "shoal/zero.h"\n', "a strategy includes another"),
    ("src/strategy/shard_gossip/shard_gossip.cpp", '#include "shoal/ddp.h"\n', "a strategy includes another"),
    ("include/shoal/other.h", '#include "shoal/error.h"\n', "does not say to which layer"),
    ("src/engine/buckets/bucket.h", "struct Large {\n  int first_;\n" + 20 * "  std::map<int, int> more_{};\n" + "};\n",
     "Large has 21 data members"),
    ("src/launch/job.h", "struct Job {\n  int first_;\n};\n", "Job has 1 data members: LARGE in check.py"),
    ("src/engine/buckets/bucket.h", 'const char open = \'{\';\nnamespace shoal {\nclass World final : public Other {};\n}\n',
     "shoal::World is defined in include/shoal/world.h and in src/engine/buckets/bucket.h"),
    ("src/optim/state.cpp", 'const char* advice = "see shoal/detail/range.h";\n', "an error names a header of detail/"),
    ("docs/a.md", "Include `shoal/detail/range.h`.\n", "names a header of detail/"),
    ("src/nowhere/a.cpp", '#include "shoal/error.h"\n', "is not in the order of layers"),
    ("include/shoal/ddp.h", "// As in DDP07.\n", "a comment names DDP07"),
    ("src/layout/other.h", "#pragma once\n// What a rank holds.\n", "opens with 'What'"),
    ("src/engine/elastic/nobody_guesses.cpp", "namespace shoal {}\n", "it has no header of its name"),
    ("src/engine/wrapper/timers.h", "#pragma once\n", "it need not be in EXCEPTIONS"),
]


def check_lengths():
    """A file that is too long, or longer than its entry, and an entry that can go."""
    files = {"src/short.cpp": 300, "src/long.cpp": 301, "src/known.h": 310, "src/cut.cpp": 300, "tests/grown_test.cpp": 402,
             "tests/full_test.cpp": 400, "python/tests/test_long.py": 401}
    with tempfile.TemporaryDirectory() as root:
        for path, count in files.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write(count * "\n")
        longer = {"src/known.h": 310, "src/cut.cpp": 320, "tests/grown_test.cpp": 401, "src/gone.cpp": 500}
        found = [line.split(",")[0] for line in lengths.violations(root, longer)]
    assert found == ["python/tests/test_long.py: 401 lines", "src/cut.cpp: 300 lines are within the limit; remove its entry "
                     "of lengths.py", "src/long.cpp: 301 lines", "tests/grown_test.cpp: 402 lines",
                     "src/gone.cpp: has an entry of lengths.py"], found


def check_requirements():
    """A row counts as tested by the name of a test, in C++ or in Python, and by nothing else."""
    names = {"tests/a_test.cpp": "TEST(Some, DDP01_works) {}\n  TEST_P(Some, BEY05_BEY06_work) {}\n// DDP02_is_spoken_of\n",
             "python/tests/test_a.py": '"""PY02 is spoken of."""\ndef test_PY01_works():\n    pass\ndef PY02_helps():\n    pass\n'}
    rows = {"DDP01": "done", "DDP02": "done", "BEY05": "done", "BEY06": "done; not on GPUs", "PY01": "done", "PY02": "done",
            "PY03": "planned"}
    with tempfile.TemporaryDirectory() as root:
        for path, text in names.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write(text)

        def found():
            os.makedirs(os.path.join(root, "docs"), exist_ok=True)
            with open(os.path.join(root, "docs", "requirements.md"), "w", encoding="utf-8") as f:
                f.writelines("| %s | what it does | `name` | %s |\n" % row for row in rows.items())
            return [line.split(" ")[0] + line[-8:] for line in requirements.violations(root)]

        assert found() == ["DDP02 with it", "PY02 with it"], found()
        del rows["PY01"]
        assert len(found()) == 3, found()


def main():
    root = sys.argv[1]
    with tempfile.TemporaryDirectory() as copy:
        for top in ("include", "src"):
            shutil.copytree(os.path.join(root, top), os.path.join(copy, top))

        def found_with(path, line):
            target = os.path.join(copy, path)
            before = open(target, encoding="utf-8").read() if os.path.exists(target) else None
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w", encoding="utf-8") as f:
                f.write((before or "") + "\n" + line)
            found = check.violations(copy)
            if before is None:
                os.remove(target)
            else:
                with open(target, "w", encoding="utf-8") as f:
                    f.write(before)
            return found

        for path, line, expected in PLANTED:
            found = found_with(path, line)
            assert any(expected in v for v in found), "%s in %s was not found: %s" % (expected, path, found)
        found = found_with("src/engine/buckets/bucket.cpp", "// c10d and getenv may be spoken of\n")
        assert found == [], found
    check_lengths()
    check_requirements()
    print("%d kinds of violation found" % len(PLANTED))


if __name__ == "__main__":
    main()
