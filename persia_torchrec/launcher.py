"""``python -m persia_torchrec.launcher``: the command line ``persia-launcher``."""

from persia_torchrec.launch.persia_launcher import main as cli

if __name__ == "__main__":
    cli()
