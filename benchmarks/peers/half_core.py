"""Takes half of one core until it is ended: `python half_core.py CORE`."""

import os
import sys
import time

PERIOD_SECONDS = 0.01

os.sched_setaffinity(0, {int(sys.argv[1])})
started, used = time.perf_counter(), time.process_time()
while True:
    owed = (time.perf_counter() - started) / 2 - (time.process_time() - used)
    if owed <= 0:
        time.sleep(PERIOD_SECONDS)
        continue
    until = time.process_time() + owed
    while time.process_time() < until:
        pass
