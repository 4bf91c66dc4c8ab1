"""The folder of one generator among temporary files."""

import os
import subprocess
import sys
import time

from hfdist.tune.generators.scratch import scratch_folder

HOLD = """
import sys, time
from pathlib import Path
from hfdist.tune.generators.scratch import scratch_folder

with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("many")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_has_left_is_removed_and_what_is_in_use_stays(tmp_path):
    (tmp_path / "of-the-user").mkdir()
    held = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    folder = held.stdout.readline().strip()
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))
    with scratch_folder(tmp_path) as own:
        assert os.path.exists(f"{folder}/weights")
        assert own.is_dir()
    assert not own.exists()
    held.kill()
    held.wait()
    with scratch_folder(tmp_path) as own:
        assert sorted(os.listdir(tmp_path)) == sorted(["of-the-user", own.name])
