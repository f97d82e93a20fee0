"""The README's main job on this machine: what it learns, and how often it waits.

    python -m tests.gpu.job [ARGUMENT OF THE COMPONENT...]

It trains twice, as ``torchx run`` does: as it stands, and with a trainer that counts
its waits for the GPU. Its AUC must be 0.89, as on the CPU, and a step may wait twice:
for the scale of the loss, and for the loss that the example keeps. One table; the
status is 1 if either does not hold.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/adult_income/train.py"
LEAST_AUC, MOST_WAITS = 0.89, 2.0
TORCHX = "import sys; from torchx.cli.main import main; sys.argv[0] = 'torchx'; main()"


def train(logs: Path, *arguments: str, **variables: str) -> tuple[float, float]:
    """Train; return the AUC of the test, 0 if the job failed, and seconds."""
    began_s = time.monotonic()
    job = subprocess.run(
        [
            *(sys.executable, "-c", TORCHX, "run", "-cfg", f"log_dir={logs}", "--"),
            *arguments,
        ],
        cwd=ROOT,
        # Roles are started as "python3".
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TORCHXCONFIG": ".torchxconfig",
            **variables,
        },
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found = re.findall(r"test AUC ([0-9.]+)", job.stdout)
    if job.returncode or not found:
        sys.stderr.write(job.stdout[-6000:])
        return 0.0, time.monotonic() - began_s
    return float(found[-1]), time.monotonic() - began_s


def main() -> int:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        auc, seconds = train(folder, *arguments)
        counting = ("--nn_worker", f"tests/gpu/counting_waits.py {SCRIPT}")
        path = folder / "waits.json"
        auc_2, seconds_2 = train(folder, *counting, *arguments, WAITS=str(path))
        found = json.loads(path.read_text()) if path.exists() else None
    waits = sum(found["waits"].values()) if found else float("inf")
    print(f"\nmain job on {device}\n")
    print("| run | AUC | seconds | waits for the GPU a step |\n|---|---|---|---|")
    print(f"| as it stands | {auc:.4f} | {seconds:.1f} | |")
    print(f"| counting waits | {auc_2:.4f} | {seconds_2:.1f} | {waits:.2f} |")
    for line, num in (found["waits"] if found else {}).items():
        print(f"| {line} | | | {num:.2f} |")
    is_good = min(auc, auc_2) >= LEAST_AUC and waits <= MOST_WAITS
    print(
        f"\n{'passed' if is_good else 'FAILED'}: an AUC of {LEAST_AUC} at least, "
        f"{MOST_WAITS:g} waits at most"
    )
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
