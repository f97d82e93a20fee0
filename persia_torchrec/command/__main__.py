"""``python -m persia_torchrec.command``, where the command is not in PATH."""

from persia_torchrec.command import main

if __name__ == "__main__":
    main(prog_name="persia-torchrec")
