"""What the command line of the PLE example may say, and what is rejected.

The options are those of DeepRec's example, and some of this project's. Each works, or
is rejected with the reason: ``Options.parse`` raises before anything is read or
started. Of those that would change nothing here a warning says so:
``Options.warnings``.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from persia_torchrec.errors import ConfigError

EPOCHS = 1000
"""Where neither steps nor epochs are said, as in the original."""

FREE = "may change when a run is resumed"
OURS = "is of the embedding servers"
"""Marks of options; ``OURS`` are rejected beside ``--tf``."""


BARE = "true"
"""What an option with choices, given without one, or as ``True``, may stand for."""

NONE = ("none", "false")
"""Values by which an option that is none by default may be left out, in any case."""


def option(default: Any, text: str, *marks: str, choices: Sequence[str] = ()) -> Any:
    """Return a field: the default, what ``--help`` says, and marks."""
    metadata = {"help": text, "marks": marks, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options, as they are given or by default; their names are the flags.

    ``given`` has the names of those that the command line says.
    """

    dataset: str = option("taobao", "data set", choices=("taobao", "census"))
    data_location: str = option("./data", "folder of the data")
    model: str = option("ple", "dense model", choices=("ple", "mmoe", "shared"))
    corrected: bool = option(
        False,
        "softmax on task gates, evaluation by moving averages of momentum 0.9, tables "
        "that begin at a std of 0.01, dropout of 0.2 on the pooled columns",
    )

    ev: bool = option(False, "raw 64-bit ids; else ids modulo the buckets", OURS)
    ev_filter: str | None = option(
        None,
        "a row on the third occurrence, counted exactly or by a Bloom filter",
        OURS,
        choices=("counter", "cbf"),
    )
    ev_elimination: str | None = option(
        None,
        "rows leave 4000 steps after their last update, or when half their squared "
        "norm is below 1",
        OURS,
        choices=("gstep", "l2"),
    )
    adaptive_emb: bool = option(False, "ids without a row share one by bucket", OURS)
    dynamic_ev: bool = option(False, "rows of 8 or 16 weights, by frequency", OURS)
    multihash: str | None = option(
        None,
        "two small tables a column, by quotient and remainder",
        OURS,
        choices=("add", "mul", "concat", BARE),
    )
    optimizer: str = option(
        "adam",
        "of both halves",
        choices=("adam", "adamasync", "adagraddecay", "adagrad", "gradientdescent"),
    )
    learning_rate: float = option(0.001, "of both halves")
    schedule: str | None = option(
        None, "the rate falls to 0 along half a cosine", choices=("cosine",)
    )
    l2_regularization: float = option(0.0, "l / 2 times the squares of dense kernels")
    bf16: bool = option(False, "dense layers in bfloat16")
    emb_fusion: bool = option(True, "one collection of all tables, or one a table")
    op_fusion: bool = option(
        True, "dense layers compiled by torch; with --tf only if it is said", FREE
    )
    smartstaged: bool = option(
        True, "reading, hashing and pulls ahead, staleness 8; else 0", OURS
    )
    staleness: int | None = option(None, "another staleness", OURS)
    micro_batch: int = option(0, "parts of each step; 0: one")

    embedding_servers: int = option(1, "servers that are started here", FREE, OURS)
    capacity: int = option(10_000_000, "rows of each of them", FREE, OURS)

    batch_size: int = option(512, "samples a step")
    steps: int = option(0, "steps to train; 0: by epochs", FREE)
    epochs: int = option(0, "passes over the data; 0: 1000", FREE)
    seed: int = option(2021, "of all weights, and of the order of the data")
    parquet_dataset: bool | None = option(
        None, "Parquet files; by default where there are any"
    )
    parquet_dataset_shuffle: bool = option(False, "rows of Parquet files are shuffled")
    workqueue: bool = option(False, "trainers share one queue of files", OURS)

    output_dir: str = option("./result", "folder of the results", FREE)
    checkpoint: str | None = option(
        None, "folder of the checkpoints; one that has some is resumed", FREE, OURS
    )
    save_steps: int = option(0, "steps between checkpoints; 0: at the end", FREE, OURS)
    keep_checkpoint_max: int = option(1, "newest checkpoints that stay", FREE, OURS)
    incremental_ckpt: float = option(0.0, "seconds between deltas", FREE, OURS)
    no_eval: bool = option(False, "train only", FREE)
    device: str | None = option(
        None,
        "of the dense layers; by default a GPU where there is one",
        FREE,
        choices=("cpu", "cuda"),
    )
    timeline: int = option(0, "a trace of every n-th step; 0: none", FREE)
    inter: int = option(0, "threads between operations; 0: torch's", FREE)
    intra: int = option(0, "threads within operations; 0: torch's", FREE)
    tf: bool = option(False, "plain TorchRec: tables in this process")
    protocol: str = option("grpc", "has no counterpart", FREE)
    input_layer_partitioner: int = option(0, "has no counterpart", FREE)
    dense_layer_partitioner: int = option(0, "has no counterpart", FREE)

    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "Options":
        """Read a command line, ``sys.argv`` by default.

        Raises:
            ConfigError: a value, or a combination, cannot be; the message says why.
        """
        values = vars(make_parser().parse_args(words))
        if values.get("multihash") == BARE:
            values["multihash"] = "add"  # which MultiHashEmbeddingBagCollection takes
        options = cls(**values, given=frozenset(values))
        for problem in _problems(options):
            raise ConfigError(problem)
        return options

    @property
    def has_raw_ids(self) -> bool:
        """Whether ids are 64 bits, and not cut to the buckets."""
        return self.ev or self.adaptive_emb or self.dynamic_ev

    @property
    def compiles(self) -> bool:
        """Whether dense layers are compiled; with ``--tf`` one must ask for it."""
        return self.op_fusion and (not self.tf or "op_fusion" in self.given)

    @property
    def pulls_ahead(self) -> bool:
        """Whether batches are read and their rows pulled before they are trained."""
        return self.smartstaged and not self.tf

    @property
    def num_parts(self) -> int:
        """Batches that the data yield for each step."""
        return self.micro_batch or 1

    @property
    def part_size(self) -> int:
        """Samples of one of them, but for those of an epoch's last step."""
        return self.batch_size // self.num_parts

    @property
    def staleness_of_rows(self) -> int:
        """Steps whose rows may be pulled, and whose update is not applied yet."""
        if self.staleness is not None:
            return self.staleness
        return 8 if self.pulls_ahead else 0

    def warnings(self) -> Iterator[str]:
        """Return what options say that has no counterpart, and changes nothing."""
        if self.protocol != "grpc":
            yield (
                f"--protocol {self.protocol} has no effect: the embedding servers have "
                "one transport, which is ZeroMQ's."
            )
        if self.input_layer_partitioner:
            yield (
                f"--input_layer_partitioner {self.input_layer_partitioner} has no "
                "effect: rows are always spread over all servers by a hash of their id."
            )
        if self.dense_layer_partitioner:
            yield (
                f"--dense_layer_partitioner {self.dense_layer_partitioner} has no "
                "effect: the dense layers are replicated at every trainer."
            )

    def require_same_as(self, folder: Path) -> None:
        """Note the options in a folder of checkpoints, or compare with those noted."""
        fixed = {
            f.name: getattr(self, f.name)
            for f in _declared()
            if FREE not in f.metadata["marks"]
        }
        del fixed["data_location"]  # the data may have moved; their names are compared
        path = folder / "options.json"
        is_resumed = any(folder.glob("checkpoint-*"))
        if not (is_resumed and path.exists()):
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.write_text(json.dumps(fixed, indent=1))
            draft.replace(path)
            return
        noted = json.loads(path.read_text())
        differences = [
            f"--{name} {noted.get(name)} -> {value}"
            for name, value in fixed.items()
            if noted.get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"A run must be resumed with its options. Received for {folder}: "
                f"{', '.join(differences)}. Give the earlier ones, or another "
                "--checkpoint."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return all options, for the results."""
        return {k: v for k, v in asdict(self).items() if k != "given"}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; an option that is not given leaves no attribute."""
    parser = argparse.ArgumentParser(
        description="Train PLE on two tasks, its tables on embedding servers.",
        argument_default=argparse.SUPPRESS,
    )
    for declared in _declared():
        default, about = declared.default, declared.metadata
        name, text = f"--{declared.name}", about["help"]
        kinds = get_args(declared.type) or (declared.type,)
        shown = "none" if default is None else str(default)
        if bool in kinds:
            shown = "where there are any" if default is None else shown.lower()
            parser.add_argument(
                name, nargs="?", const=True, type=_truth, help=f"{text} [{shown}]"
            )
            continue
        kind: Callable[[str], Any] = next(k for k in kinds if k is not type(None))
        choices, bare = about["choices"], {}
        if BARE in choices:
            bare = {"nargs": "?", "const": BARE}
        if choices and default is None:
            kind, choices = _or_none, (*choices, None)
            named = [one for one in about["choices"] if one != BARE]
            bare["metavar"] = f"{{{','.join(named)},none}}"
        parser.add_argument(
            name,
            type=kind,
            choices=choices or None,
            help=f"{text} [{shown}]",
            **bare,
        )
    return parser


def _declared() -> list[Any]:
    return [f for f in fields(Options) if "help" in f.metadata]


def _or_none(text: str) -> str | None:
    """Return a choice in lower case; None for what leaves an option out."""
    return None if text.lower() in NONE else text.lower()


def _truth(text: str) -> bool:
    known = {"true": True, "false": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return known[text.lower()]


def _problems(options: Options) -> Iterator[str]:
    yield from _out_of_range(options)
    yield from _beside_plain(options)
    yield from _of_rows(options)


def _out_of_range(options: Options) -> Iterator[str]:
    least = {"batch_size": 2, "embedding_servers": 1, "capacity": 1}
    least |= {"keep_checkpoint_max": 1, "learning_rate": 0, "l2_regularization": 0}
    least |= dict.fromkeys(("steps", "epochs", "save_steps", "incremental_ckpt"), 0)
    least |= dict.fromkeys(("timeline", "inter", "intra", "micro_batch", "seed"), 0)
    least |= {"staleness": 0}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            yield f"--{name} must be >= {bound}. Received: {value}."
    parts = options.num_parts
    if options.batch_size % parts or options.part_size < 2:
        yield (
            "--micro_batch must divide --batch_size into equal parts of at least two "
            f"samples, as batch norm needs. Received: {parts} parts of "
            f"{options.batch_size}."
        )
    if options.steps and options.epochs:
        yield (
            "--steps and --epochs both say when training ends. Received: "
            f"{options.steps} and {options.epochs}. Leave one of them out."
        )


def _beside_plain(options: Options) -> Iterator[str]:
    if not options.tf:
        return
    of_servers = {f.name for f in _declared() if OURS in f.metadata["marks"]}
    given = sorted(
        name
        for name in options.given & of_servers
        if getattr(options, name) not in (False, None)
    )
    if given:
        yield (
            "--tf is plain TorchRec, without embedding servers and what they can. "
            f"Received beside it: {', '.join(f'--{name}' for name in given)}."
        )
    if options.optimizer != "adam":
        yield (
            "--tf trains with Adam, as the original does. Received: --optimizer "
            f"{options.optimizer}."
        )


def _of_rows(options: Options) -> Iterator[str]:
    kinds = ("adaptive_emb", "dynamic_ev", "multihash")
    chosen = [f"--{name}" for name in kinds if getattr(options, name)]
    if len(chosen) > 1:
        yield (
            "--adaptive_emb, --dynamic_ev and --multihash each say what a row is. "
            f"Received: {' and '.join(chosen)}. Leave all but one out."
        )
    if options.multihash and options.ev:
        yield (
            "--multihash needs ids below the number of buckets, and --ev has raw "
            "64-bit ids. Received: both. Leave one of them out."
        )
    for name in ("ev_filter", "ev_elimination"):
        if getattr(options, name) and not (options.ev or options.adaptive_emb):
            yield (
                f"--{name} must come with --ev or --adaptive_emb, of whose rows it "
                f"speaks. Received: --{name} {getattr(options, name)} alone."
            )
