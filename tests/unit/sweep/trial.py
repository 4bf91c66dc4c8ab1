"""What a run leaves, without a model: `python -m tests.unit.sweep.trial key=value ...` keeps the records of a run.

Its loss falls with the steps, to a floor that the rate decides: 0 at `optimizer.lr=0.01`.
"""

import math
import signal
import sys
import time
from pathlib import Path

from hfdist.records import RunFolder, RunRecorder
from hfdist.records.lines import append_line, read_lines

STEP_SECONDS = 0.005
TOKENS_PER_STEP = 8 * 128


def loss(lr, step):
    return abs(math.log10(lr) + 2) + 1 / (1 + step)


def main():
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    folder, lr, last = Path(given["run.dir"]), float(given["optimizer.lr"]), int(given["train.max_steps"])
    folder.mkdir(parents=True, exist_ok=True)
    recorder = RunRecorder(folder, {}, 1)
    recorder.record.max_steps = last
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    # A path such as .../step-00000012
    first = 1 + int(given["checkpoint.resume"][-8:]) if "checkpoint.resume" in given else 1
    steps = [line["step"] for line in read_lines(RunFolder(folder).metrics)]
    assert steps == list(range(first, first + len(steps))), "each step is done once"
    if "ended" in given:
        recorder.end(int(given["ended"]), "ended from outside")
        sys.exit(int(given["ended"]))
    if given.get("fail") == "true" and lr > 0.01:
        recorder.end(5, "the loss is not finite")
        sys.exit(5)
    # As a run that goes on: it may have been killed after its last step.
    done = first - 1 + len(steps)
    recorder.record.step, recorder.record.tokens = done, done * TOKENS_PER_STEP
    for step in range(done + 1, last + 1):
        if step > int(given.get("budget", last)):
            recorder.end(8, "the budget is used up")
            sys.exit(8)
        if told:
            recorder.end(75, "told to stop")
            sys.exit(75)
        time.sleep(STEP_SECONDS)
        append_line(RunFolder(folder).metrics, {"step": step, "eval_loss": loss(lr, step)})
        recorder.record.step, recorder.record.tokens = step, step * TOKENS_PER_STEP
    (folder / f"checkpoints/step-{last:08d}").mkdir(parents=True, exist_ok=True)
    recorder.end(0)


if __name__ == "__main__":
    main()
