import subprocess
import sys

import pytest

import persia_torchrec
from tests.support.processes import Processes, run_script

pytestmark = pytest.mark.slow


def test_every_public_name_is_listed_once_and_imports():
    # Their order is ruff's business (RUF022).
    assert sorted(persia_torchrec.__all__) == sorted(set(dir(persia_torchrec)))
    for name in persia_torchrec.__all__:
        found = getattr(persia_torchrec, name)
        module = getattr(found, "__module__", getattr(found, "__name__", None))
        assert module is None or module.startswith("persia_torchrec")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'TrainContext'"):
        _ = persia_torchrec.TrainContext


@pytest.mark.parametrize(
    ("modules", "not_loaded"),
    [
        ("persia_torchrec", "numpy numba torch torchrec torchx zmq"),
        (
            "persia_torchrec.server.server, persia_torchrec.server.__main__, "
            "persia_torchrec.store.embedding_store, persia_torchrec.client.client, "
            "persia_torchrec.persia.ctx.data_ctx, persia_torchrec.job.script",
            "torch torchrec torchx fbgemm_gpu",
        ),
        (
            "persia_torchrec.persia.worker.__main__, persia_torchrec.serving.__main__",
            "torchrec torchx fbgemm_gpu",
        ),
    ],
)
def test_a_module_imports_only_the_libraries_it_needs(modules, not_loaded):
    code = (
        f"import sys, {modules}\n"
        f"loaded = {set(not_loaded.split())} & sys.modules.keys()\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trainer_does_not_import_torchx(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, persia_torchrec.persia.ctx.train_ctx\n"
        "assert 'torchx' not in sys.modules"
    )
    with Processes(tmp_path) as processes:
        running = processes.start("script", run_script, script)
        assert running.status() == 0, running.output()
