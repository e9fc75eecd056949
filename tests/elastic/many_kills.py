"""ELA02: ranks of elastic jobs are killed at random moments until a number of them has died, and what that showed.

    python many_kills.py BUILD [--kills 500] [--seed 1]

Runs the random tests of elastic_test in turn, each time with the next seed: every strategy, 2 to 4 ranks, rank 0 included, on one
host and on emulated hosts. After each step the state is compared with that of a run of one process. Ends with code 1 and the
output of the first test that fails, for which SHOAL_SEED and SHOAL_KILLS repeat it.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

TRIALS = 24  # of a test with one seed
TESTS = (
    "ElasticKill.ELA01_ELA02_ranks_end_at_random_moments",
    "ElasticKill.ELA01_ELA02_ELA03_sharded_ranks_end_at_random_moments",
    "ElasticHosts.ELA01_ELA02_ranks_and_hosts_end_at_random_moments",
    "ElasticHybrid.ELA01_ELA02_ELA04_ranks_and_hosts_end_at_random_moments",
    "ElasticSecondOwner.ELA01_ELA02_ELA04_ranks_and_hosts_end_at_random_moments",
    "ElasticGossip.ELA12_ranks_and_hosts_end_at_random_moments",
    "ElasticLocal.ELA12_ranks_end_at_random_moments",
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    trials, kills = dict.fromkeys(TESTS, 0), dict.fromkeys(TESTS, 0)
    of_rank_0 = 0
    seed = options.seed
    while sum(kills.values()) < options.kills:
        for test in TESTS:
            environment = {**os.environ, "SHOAL_KILLS": str(TRIALS), "SHOAL_SEED": str(seed)}
            ended = subprocess.run([options.build / "elastic_test", f"--gtest_filter={test}"], env=environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
            counted = re.search(r"(\d+) trials, (\d+) kills, (\d+) of them of rank 0", ended.stdout)
            if ended.returncode != 0 or counted is None:
                sys.exit(f"{ended.stdout}\nfailed: {test} with SHOAL_SEED={seed} SHOAL_KILLS={TRIALS}")
            trials[test] += int(counted[1])
            kills[test] += int(counted[2])
            of_rank_0 += int(counted[3])
        seed += 1
    for test in TESTS:
        print(f"{kills[test]:6} kills in {trials[test]:5} trials: {test}")
    print(f"{sum(kills.values()):6} kills in {sum(trials.values()):5} trials, {of_rank_0} of them of rank 0, seeds {options.seed} to {seed - 1}: no job lost, no "
          f"rank left waiting, state after each step as in one process; {time.monotonic() - begin:.0f} s")


main()
