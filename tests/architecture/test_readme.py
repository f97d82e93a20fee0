"""README and the pages of docs/: what they say to run is run, what they name is there.

A command is run here, in another test, or by `make test`.
"""

import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from torchx.cli import main as torchx
from torchx.cli.argparse_util import ArgOnceAction, torchxconfig
from torchx.runner import get_runner

from persia_torchrec import command as command_line
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.persia import launcher
from persia_torchrec.serving.__main__ import ServingFlags
from tests.support.pages import DOCS, LINKING, PAGES, blocks, commands, prose
from tests.support.processes import Processes, run_script
from tests.support.repository import ROOT

MAX_WORDS = 700

# What runs a command that does not run in this file.
RUN_BY = {
    "pip install": "tests/wheel/test_fresh_environment.py",
    "make install": "make test",
    "torchx run\n": "tests/integration/test_main_job.py",  # without any argument
    "PERSIA_CKPT_DIR=runs/7 torchx run\n": "tests/serving/test_main.py",
    "torchx run -s local_cwd persia.train": "tests/integration/test_main_job.py",
    "torchx run -s local_cwd persia.train_torchrec": (
        "tests/integration/test_torchrec_job.py"
    ),
    "persia-torchrec run": "tests/integration/test_command_run.py",
    "persia-torchrec serve": "tests/command/test_start.py",
    "persia-torchrec stop": "tests/command/test_jobs.py",
    "persia-torchrec scale": "tests/command/test_start_again.py",
    "persia-torchrec rollback": "tests/command/test_start_again.py",
    "persia-torchrec data": "tests/datasets/test_look_page.py",
    "persia-torchrec examples": "tests/wheel/test_fresh_environment.py",
    "python3 -m venv": "tests/wheel/test_fresh_environment.py",
    "python -m benchmarks": "tests/benchmarks/test_benchmarks.py",
    "python -m persia_torchrec.persia.convert": ("tests/persia/test_convert.py"),
    "python -m persia_torchrec.serving": "tests/serving/test_main.py",
    "curl localhost": "tests/serving/test_inference_protocol.py",
    "export PERSIA_": "tests/integration/test_persia_launcher_job.py",
    "persia-launcher coordinator": "tests/integration/test_persia_launcher_job.py",
    "persia-launcher data-loader": "tests/integration/test_persia_launcher_job.py",
    "persia-launcher nn-worker": "tests/integration/test_persia_launcher_job.py",
    "persia-launcher embedding-parameter-server": (
        "tests/integration/test_inference_job.py"
    ),
    "persia-launcher embedding-worker": "tests/integration/test_inference_job.py",
    "persia-k8s-utils convert": "tests/persia/test_k8s_utils.py",
}
# Pages of the site that its navigation leaves to CONTRIBUTING.md.
OF_CONTRIBUTORS = {
    *("internals", "decisions"),
    *("formats/checkpoint", "formats/memory", "formats/messages"),
}
RUN_HERE = (
    *("python examples/quickstart.py", "unshare "),
    *("torchx run -s slurm", "torchx run -s kubernetes"),
)


def run(script, folder):
    """Run a script from the root of the repository; return its output."""
    with Processes(folder) as processes:
        running = processes.start("script", run_script, script, cwd=ROOT)
        assert running.status() == 0, running.output()
    return running.output()


def run_block(block, folder):
    """Run an example of a page; return its output."""
    script = folder / "block.py"
    script.write_text(block)
    return run(script, folder)


def test_the_front_page_is_short():
    assert len(PAGES["README.md"].split()) <= MAX_WORDS


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_first_example_prints_what_the_front_page_shows(tmp_path):
    (block,) = blocks("python", "README.md")
    pattern = r"It prints\n\n```\n(.*?)```"
    (shown,) = re.findall(pattern, PAGES["README.md"], re.DOTALL)
    lines = shown.splitlines()
    assert len(lines) == 5
    printed = run_block(block, tmp_path).splitlines()
    assert [line for line in printed if line in lines] == lines


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_example_of_settings_runs_as_it_stands(tmp_path):
    (block,) = blocks("python", "docs/reference.md")
    # Their rows were made on the third occurrence, and updated then and twice more.
    assert "frequency [5 5] last step [5 5]" in run_block(block, tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tutorial", "printed"),
    [
        ("torchrec", r"right (1\.00|0\.9\d), rows \[\d+, \d+\]"),
        ("recovery", r"loss \d+\.\d{4}, 100 rows"),
    ],
)
def test_the_script_of_a_tutorial_runs_as_it_stands(tmp_path, tutorial, printed):
    (block,) = blocks("python", f"docs/tutorials/{tutorial}.md")
    assert re.search(printed, run_block(block, tmp_path))


def test_no_other_page_has_an_example_in_python():
    of_clients = blocks("python", "docs/serving.md")  # test_inference_protocol runs it
    of_epochs = blocks("python", "docs/torchrec.md")  # test_recovery_epochs runs it
    of_data = blocks("python", "docs/data.md")  # test_look_page runs them
    num_others = len(of_clients) + len(of_epochs) + len(of_data)
    assert len(blocks("python")) == 4 + num_others
    assert len(of_epochs) == 1
    assert len(of_data) == 2
    assert len(of_clients) == 1


@pytest.mark.slow
def test_what_a_page_submits_to_a_cluster_is_accepted(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    given = [command for block in blocks("bash") for command in commands(block)]
    dry = [
        command
        for command in given
        if re.match("torchx run -s (slurm|kubernetes)", command)
    ]
    assert len(dry) >= 3
    for command in dry:
        assert " --dryrun " in command
        for kind in (ArgOnceAction, torchxconfig):
            kind.called_args.clear()  # as of a process that has run no other
        torchx.main(shlex.split(command)[1:])
        assert "persia_torchrec.job.coordinator" in capsys.readouterr().out


@pytest.mark.slow
def test_components_take_the_arguments_that_pages_give(monkeypatch):
    given = {command for block in blocks("bash") for command in commands(block)}
    begins = "torchx run -s local_cwd persia."
    local = [shlex.split(one) for one in given if one.startswith(begins)]
    assert len(local) >= 3
    monkeypatch.chdir(ROOT)
    with get_runner() as runner:
        for _, _, _, _, component, *words in local:
            started = runner.dryrun_component(component, words, "local_cwd", {})
            assert "coordinator" in {role.name for role in started._app.roles}


def verb_of(words):
    """Return the verb of ``persia-torchrec`` that words give, and its own words."""
    found = command_line.main
    while isinstance(found, click.Group) and words:
        _, found, words = found.resolve_command(click.Context(found), words)
    return found, words


def test_verbs_take_the_options_and_arguments_that_pages_give():
    given = {command for block in blocks("bash") for command in commands(block)}
    for text in PAGES.values():
        given.update(re.findall(r"`(persia-torchrec [^`]+)`", prose(text)))
    given = [one for one in given if one.startswith("persia-torchrec ")]
    assert len(given) >= 20
    for command in given:
        verb, words = verb_of(shlex.split(command)[1:])
        context = click.Context(verb, **verb.context_settings)
        _, left, _ = verb.make_parser(context).parse_args(words)
        assert not left, command


@pytest.mark.parametrize(
    ("program", "parse"),
    [
        ("persia-launcher", lambda words: launcher.parser().parse_args(words)),
        (
            "python -m persia_torchrec.serving",
            lambda words: parse_flags(ServingFlags, words, prog="serving"),
        ),
    ],
)
def test_programs_take_the_flags_that_pages_give(monkeypatch, program, parse):
    monkeypatch.chdir(ROOT)
    given = {command for block in blocks("bash") for command in commands(block)}
    given = [one for one in given if one.startswith(f"{program} ")]
    assert len(given) >= 2
    for command in given:
        words = command.removeprefix(program).removesuffix("&")
        parse(shlex.split(words, comments=True))


def test_imports_of_a_diff_exist():
    lines = [line for block in blocks("diff") for line in block.splitlines()]
    imports = [line[1:] for line in lines if line.startswith("+from ")]
    assert imports
    for line in imports:
        exec(line, {})


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    output = run(ROOT / "examples/quickstart.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+),", output)]
    assert losses[-1] < 0.2 < 0.6 < losses[0]


def test_the_quickstart_is_short():
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) < 60


def test_every_shell_command_is_run_somewhere():
    given = [f"{command}\n" for block in blocks("bash") for command in commands(block)]
    for command in given:
        assert command.startswith((*RUN_BY, *RUN_HERE)), command
    for known in (*RUN_BY, *RUN_HERE):
        assert any(command.startswith(known) for command in given), known
    for test in RUN_BY.values():
        assert test == "make test" or (ROOT / test).is_file(), test


def test_the_scripts_and_settings_that_a_command_names_are_there():
    given = [command for block in blocks("bash") for command in commands(block)]
    named = {
        name
        for command in given
        if command.startswith(
            ("torchx run", "persia-torchrec run", "python -m persia_torchrec.serving")
        )
        for words in map(str.split, shlex.split(command))
        for name in words
        if name.endswith((".py", ".yml"))
    }
    assert {"examples/train.py", "examples/adult_income/train.py"} <= named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_a_user_gets_a_file_system_with_huge_pages():
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux' unshare")
    (block,) = blocks("bash", "docs/formats/memory.md")
    assert block.count(" && exec sleep infinity") == 1
    shown = subprocess.run(
        ["sh", "-c", block.replace(" && exec sleep infinity", "")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "peration not permitted" in shown.stderr or "denied" in shown.stderr:
        pytest.skip(f"needs user namespaces: {shown.stderr}")
    assert re.fullmatch(r"/proc/\d+/fd/3\n", shown.stdout), shown.stderr


def test_no_page_stands_in_the_package():
    assert list((ROOT / "persia_torchrec").rglob("*.md")) == []


def test_every_page_for_users_stands_in_the_contents_of_the_site():
    given = re.findall(r"^   ([\w/*.-]+)$", (DOCS / "index.rst").read_text(), re.M)
    pages = [*DOCS.rglob("*.md"), *DOCS.glob("*/*.rst")]
    names = {str(page.relative_to(DOCS).with_suffix("")) for page in pages}
    missing = {
        name for name in names if not any(fnmatch(name, entry) for entry in given)
    }
    assert missing - OF_CONTRIBUTORS == {"README"}
    linked = {
        Path(target).name
        for text in LINKING.values()
        for target in re.findall(r"\]\(([^)#\s]+)", text)
    }
    for name in OF_CONTRIBUTORS:
        assert f"{Path(name).name}.md" in linked


def test_every_picture_is_shown_on_a_page_and_has_a_title():
    for image in (DOCS / "images").glob("*.svg"):
        root = ElementTree.fromstring(image.read_text())
        if not image.name.startswith("overview"):
            assert root.find("{http://www.w3.org/2000/svg}title") is not None, image
        assert any(image.name in page for page in PAGES.values()), image


def test_the_pictures_for_light_and_dark_differ_in_colours_only():
    images = [DOCS / f"images/overview-{theme}.svg" for theme in ("dark", "light")]
    dark, light = (re.sub("#[0-9a-f]{6}", "", image.read_text()) for image in images)
    assert dark == light
