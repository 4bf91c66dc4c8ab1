"""Run the app on this machine with real parts: a SuperLink, three SuperNodes, and hfdist in each client.

python try_here.py --hfdist PATH_OF_HFDIST [KEY=VALUE of the app's config ...]

Start it with the Python of the app's environment. The rows are the standard library's sources, split by a Dirichlet
distribution over its packages.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = 3
SMALL = """data.sequence_length=64 data.workers=0 data.eval_sequences=32 data.eval_fraction=0.1
    train.micro_batch_size=2 train.global_batch_size=8 checkpoint=none report=quiet"""
TRAIN = "train.max_steps=40 optimizer.lr=3e-3 optimizer.schedule=constant strategy=ddp launch.processes=2"


def write_rows(path: Path, most: int = 600) -> None:
    """Write the sources of the standard library, each with the package that it is in."""
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests"}
    files = [file for file in sorted(library.rglob("*.py")) if not left_out.intersection(file.parts)]
    with path.open("w", encoding="utf-8") as rows:
        for file in files[:most]:
            text = file.read_text(encoding="utf-8", errors="ignore")
            rows.write(json.dumps({"text": text, "label": file.relative_to(library).parts[0]}) + "\n")


def free_port() -> int:
    """Find one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until something listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hfdist", required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.mkdtemp(prefix="federated-")))
    parser.add_argument("config", nargs="*")
    args = parser.parse_args()
    work, programs = args.work.resolve(), Path(sys.executable).parent
    work.mkdir(parents=True, exist_ok=True)
    write_rows(work / "rows.jsonl")
    split = [
        str(work / "rows.jsonl"),
        str(work / "data"),
        "--clients",
        str(CLIENTS),
        "--key",
        "label",
        "--alpha",
        "0.5",
    ]
    subprocess.run([sys.executable, str(HERE / "split.py"), *split], check=True)
    # The model with which all begin: one step that changes nothing.
    data = f"data=files data.sources.files.path={work}/rows.jsonl"
    begin = f"pretrain model=tiny run.dir={work}/begin {data} {SMALL} train.max_steps=1 optimizer.lr=1e-30"
    subprocess.run([args.hfdist, *begin.split()], check=True)
    port = free_port()
    address = f"127.0.0.1:{port}"
    home = work / "flower"
    home.mkdir(exist_ok=True)
    link = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    (home / "config.toml").write_text(link)
    own = {"FLWR_HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "FLWR_TELEMETRY_ENABLED": "0"}
    environment = os.environ | own
    started = []

    def start(name: str, *command: str) -> None:
        log = (work / f"{name}.log").open("w")
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    try:
        # The app's packages are here already.
        options = ["--insecure", "--disable-runtime-dependency-installation", "--port", str(port)]
        start("superlink", str(programs / "flower-superlink"), *options)
        wait_for(port)
        for client in range(CLIENTS):
            data = f"data=files data.sources.files.path={work}/data/{client}.jsonl data.seed={client}"
            settings = {
                "hfdist": args.hfdist,
                "model": f"{work}/begin/model",
                "work": f"{work}/client-{client}",
                "overrides": " ".join(f"{data} {SMALL} {TRAIN}".split()),
            }
            node = " ".join(f'{key}="{value}"' for key, value in settings.items())
            own = ["--superlink", address, "--node-config", node, "--port", str(free_port())]
            start(f"supernode-{client}", str(programs / "flower-supernode"), "--insecure", *own)
        config = " ".join([f'model="{work}/begin/model"', f'out="{work}/model"', *args.config])
        run = [str(programs / "flwr"), "run", str(HERE), "here", "--stream", "--run-config", config]
        subprocess.run(run, env=environment, check=True)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()


if __name__ == "__main__":
    main()
