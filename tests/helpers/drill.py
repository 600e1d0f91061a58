"""Kill a training run again and again, and go on each time: `python -m helpers.drill UNDISTURBED KILLED MOMENT...`.

Both are run files; the first run is left alone. A moment is a number of seconds after the start, or "save" for as soon
as a checkpoint is being written. Each kill is followed by a new process; after the last kill one runs to its end. The
processes are forked from this one, which has imported everything and computed nothing, so that a start takes no time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from fast_llm_ssm.train.config import RunConfig, load_config
from fast_llm_ssm.train.trainer import train


def start(config: RunConfig) -> int:
    """Train in a process of its own; returns its id."""
    if pid := os.fork():
        return pid
    try:
        train(config)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def finish(config: RunConfig) -> None:
    """Train to the end."""
    _, status = os.waitpid(start(config), 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(code)


def wait_for(moment: str, pid: int, checkpoints: Path) -> None:
    """Until the moment has come, or the process has ended."""
    begin = time.monotonic()
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        saving = moment == "save" and any(checkpoints.glob("*.tmp-*"))
        if saving or (moment != "save" and time.monotonic() - begin >= float(moment)):
            return
        time.sleep(0.0005)


def main() -> None:
    torch.set_num_threads(1)
    undisturbed, config = (load_config(path) for path in sys.argv[1:3])
    finish(undisturbed)
    checkpoints = config.runs / str(config.name) / "checkpoints"
    for moment in sys.argv[3:]:
        pid = start(config)
        wait_for(moment, pid, checkpoints)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        left = sorted(path.name.partition(".tmp-")[0] for path in checkpoints.glob("*.tmp-*"))
        print(moment, "killed" if os.WIFSIGNALED(status) else "ended", *left)
    finish(config)


if __name__ == "__main__":
    main()
