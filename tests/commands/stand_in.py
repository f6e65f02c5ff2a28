"""Stand-in for `python -m lit_models`: writes its options into a file, and a file into its folder.

Its options can make it fail or wait for a signal.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

verb, *rest = sys.argv[1:]
given = dict(word[2:].split("=", 1) for word in rest if "=" in word)
folder = Path(given.get("to") or given["trainer.default_root_dir"])
with open("calls.txt", "a") as calls:
    print(folder.name, *sorted(f"{k}={given[k]}" for k in given if k != "to"), file=calls)
if "wait" in given and "ckpt_path" not in given:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path("waiting.txt").write_text(str(child.pid))
    time.sleep(60)
out = folder / ("checkpoints/last.ckpt" if verb == "fit" else "out.txt")
if verb == "predict" and out.exists():
    sys.exit(f"{out} exists and is not overwritten")
if "silent" not in given:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(" ".join(rest[:1]))
if Path("fail").exists() and Path("fail").read_text() == folder.name:
    sys.exit(3)
