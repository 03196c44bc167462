"""Runs a command as rank 3 that is stopped most of the time, as on a core that others keep busy.

srun … python slowed.py RUNS python -m meshrun doctor

It begins once the rank has its torch and ends with its last letter: nobody needs to wait for a slow import or exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

runs, *command = sys.argv[1:]
child = subprocess.Popen(command)
if os.environ["SLURM_PROCID"] == "3":
    letters = Path(runs, ".doctor")
    while child.poll() is None and not list(letters.glob("*/*/ready-3.json")):
        time.sleep(0.005)
    while (
        child.poll() is None
        and list(letters.glob("*/*/ready-3.json"))
        and not list(letters.glob("*/*/together-3.json"))
    ):
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.003)
sys.exit(child.wait())
