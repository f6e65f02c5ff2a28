"""`unisono` with a signal on its way: python -m tests.distributed.signalled SIGTERM LEDGER fit …

The signal comes from another process, as soon as the ledger shows five steps; SIGUSR1 again and
again until this one has ended, as from a job's script.
"""

import os
import signal
import subprocess
import sys

from lit_models.__main__ import main

SENDER = (
    "import os, sys, time\n"
    "ledger, pid, signum = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
    "while not os.path.exists(ledger) or open(ledger).read().count('\\n') < 6: time.sleep(0.05)\n"
    "os.kill(pid, signum)\n"
    f"while signum == {signal.SIGUSR1} and not time.sleep(0.02) and os.getppid() == pid:\n"
    "    os.kill(pid, signum)\n"
)

if __name__ == "__main__":
    name, ledger = sys.argv[1:3]
    arguments = [ledger, str(os.getpid()), str(int(signal.Signals[name]))]
    sender = subprocess.Popen([sys.executable, "-c", SENDER, *arguments])
    sys.argv = ["unisono", *sys.argv[3:]]
    status = main()
    if name != signal.SIGUSR1.name:
        sender.wait()
    sys.exit(status)
