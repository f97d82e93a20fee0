from tests.support.processes import Processes, run_script

SCRIPT = """
import logging, sys
assert "torchrec" in sys.modules
assert "persia_torchrec.persia.worker.__main__" in sys.modules
assert logging.root.handlers == []
"""


def test_a_process_starts_with_torchrec_imported_and_without_log_handlers(tmp_path):
    """The forkserver ignores it when ``preloaded.py`` cannot be imported."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with Processes(tmp_path) as processes:
        running = processes.start("script", run_script, tmp_path / "script.py")
        assert running.status() == 0, running.output()
