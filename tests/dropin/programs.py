"""Programs of others: where they are, the lines that plug the servers in, and runs.

A patch is pairs of a line, or of lines, of the program and what they become. It has
nothing but the plug-in in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

SIZES = (
    "--num_embeddings_per_feature="
    + ",".join(str(n) for n in (300, 40, 500, 200, 60, 3, 90, 30, 7, 400, 80, 500, 20))
    + ","
    + ",".join(str(20 + 17 * n) for n in range(13))
)
HOT = "--multi_hot_sizes=" + ",".join(str(1 + n % 4) for n in range(26))
UNIFORM = "--multi_hot_distribution_type=uniform"
SMALL = [
    "--embedding_dim=16",
    "--dense_arch_layer_sizes=32,16",
    "--over_arch_layer_sizes=32,16,1",
    "--batch_size=64",
    "--learning_rate=0.1",
    "--seed=1",
    SIZES,
]
DCN = ["--interaction_type=dcn", "--dcn_num_layers=2", "--dcn_low_rank_dim=8"]
ADAGRAD = ["--adagrad", "--learning_rate=0.005"]  # MLPerf's
SCHEDULE = ["--lr_warmup_steps=5", "--lr_decay_start=10", "--lr_decay_steps=10"]

EVALUATED = ["--evaluate_on_epoch_end", "--evaluate_on_training_end"]


@dataclass(frozen=True)
class Program:
    """A program: its repository and commit, its folder there, patch and runs.

    ``driver`` is the module of this folder that calls it, ``patched_file`` the one of
    its files that is patched. ``packages`` are what it needs beside this project's
    environment, in a folder of their own; ``build`` is a command in its folder. One
    that ``saves_checkpoints`` continues from those of the other kind too. ``most`` is
    how far a loss may be, by the title of a run, where that is not 1e-5, and
    ``most_of_metrics`` how far metrics of 6 digits may be. ``checkout`` names the
    folder of the repository, by default as the repository.
    """

    repository: str
    commit: str
    folder: str
    driver: str
    patched_file: str
    patch: tuple[tuple[str, str], ...]
    runs: dict[str, list[str]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    saves_checkpoints: bool = False
    most: dict[str, float] = field(default_factory=dict)
    most_of_metrics: float = 0.0
    checkout: str = ""

    def patched(self, source: str) -> str:
        """Return the source of the program with the servers plugged in."""
        for before, after in self.patch:
            if source.count(before) != 1:
                raise ValueError(f"{self.patched_file} must have {before!r} once.")
            source = source.replace(before, after)
        return source

    def num_lines(self) -> tuple[int, int]:
        """Return how many lines of the program are new, and how many are changed.

        Of lines that become fewer, those that are left are changed.
        """
        new = changed = 0
        for before, after in self.patch:
            old, now = before.splitlines(), after.splitlines()
            kept = sum(line in old for line in now)
            changed += min(len(old), len(now)) - kept
            new += max(len(now) - len(old), 0)
        return new, changed

    def top(self, checkouts: Path) -> Path:
        """Return the folder of the program's repository below that of all checkouts."""
        return checkouts / (self.checkout or self.repository.rpartition("/")[2])

    def root(self, checkouts: Path) -> Path:
        """Return the program's folder there."""
        return self.top(checkouts) / self.folder


_DLRM_PATCH = (
    (
        "from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology",
        "from persia_torchrec import EmbeddingClient, remote_sharders\n"
        "from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology",
    ),
    (
        "    plan = planner.collective_plan(\n"
        "        train_model, get_default_sharders(), dist.GroupMember.WORLD",
        "    client = EmbeddingClient.connect(os.environ['SERVERS'].split(','))\n"
        "    sharders = remote_sharders(client, staleness=0)\n"
        "    plan = planner.collective_plan(\n"
        "        train_model, sharders, dist.GroupMember.WORLD",
    ),
    (
        "        plan=plan,\n    )",
        "        plan=plan,\n        sharders=sharders,\n    )",
    ),
)

_HSTU_PATCH = (
    (
        "import torchrec\n",
        "import torchrec\n"
        "from persia_torchrec import EmbeddingClient, remote_sharders\n",
    ),
    (
        "    sharders = get_default_sharders()\n",
        "    client = EmbeddingClient.connect(os.environ['SERVERS'].split(','))\n"
        "    sharders = remote_sharders(client, staleness=0)\n",
    ),
)
_TZREC_PATCH = (
    (
        "from torch import nn\n",
        "from torch import nn\n"
        "from persia_torchrec import Adagrad, EmbeddingClient, remote_sharders\n",
    ),
    (
        '    """Get embedding module default sharder."""\n',
        '    """Get embedding module default sharder."""\n'
        "    client = EmbeddingClient.connect(os.environ['SERVERS'].split(','))\n"
        # What evaluation of a checkpoint has before the training names an optimizer.
        "    return remote_sharders(client, Adagrad(), staleness=0)\n",
    ),
)

_IMPORT = "from persia_torchrec import EmbeddingClient, remote_sharders\n"
_CLIENT = "EmbeddingClient.connect(os.environ['SERVERS'].split(','))"
_OF_BAGS = (
    "from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder\n"
)
_FUSED = (
    "from torchrec.distributed.fused_embeddingbag import "
    "FusedEmbeddingBagCollectionSharder\n"
)
_QCOMM = "EmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs_registry)"


def _example(
    path: str,
    *patch: tuple[str, str],
    packages: tuple[str, ...] = (),
    runs: Mapping[str, Sequence[str]] | None = None,
) -> Program:
    """Return an example of TorchRec's repository; ``patch`` has no import."""
    runs = runs or {path.rpartition("/")[2]: []}
    return Program(
        "meta-pytorch/torchrec",
        "376cac6ad13c3a6e7fd43cc0fe432abbc7c39f7d",
        ".",
        "examples",
        f"{path}.py",
        patch,
        {title: [f"program={path}", *given] for title, given in runs.items()},
        packages=packages,
        checkout="torchrec-examples",
    )


_EXAMPLES = {
    "golden": _example(
        "examples/golden_training/train_dlrm",
        (_OF_BAGS, _OF_BAGS + _IMPORT),
        (f"sharder = {_QCOMM}", f"sharder = remote_sharders({_CLIENT})"),
        ("        sharders=[sharder],\n", "        sharders=sharder,\n"),
    ),
    "golden-dense": _example(
        "examples/golden_training/train_dlrm_data_parallel",
        (
            _OF_BAGS,
            _OF_BAGS + "from persia_torchrec import EmbeddingClient, MixedSharder, "
            "Placement, RemoteEmbeddingBagCollectionSharder\n",
        ),
        (
            "    plan: ShardingPlan = planner.collective_plan(train_model)\n",
            f"    remote = RemoteEmbeddingBagCollectionSharder({_CLIENT})\n"
            "    sharder = MixedSharder(remote, Placement(local=['t_cat_10']))\n"
            "    plan: ShardingPlan = planner.collective_plan(train_model, [sharder], "
            "dist.group.WORLD)\n",
        ),
        (f"    sharder = {_QCOMM}\n", ""),
    ),
    "ray": _example(
        "examples/ray/train_torchrec",
        (_OF_BAGS, _OF_BAGS + _IMPORT),
        (
            "    sharders = [\n"
            "        EmbeddingBagCollectionSharder(fused_params=fused_params),\n"
            "    ]\n",
            f"    sharders = remote_sharders({_CLIENT}, fused_params=fused_params)\n",
        ),
    ),
    "quickstart": _example(
        "examples/cloud_deployment/quickstart/train_torchrec_quickstart",
        (f"    {_OF_BAGS}", f"    {_OF_BAGS}    {_IMPORT}"),
        (
            "        sharders = cast(\n"
            "            List[ModuleSharder[nn.Module]],\n"
            "            [EmbeddingBagCollectionSharder()],\n"
            "        )\n",
            f"        sharders = remote_sharders({_CLIENT})\n",
        ),
    ),
    "nvt": _example(
        "examples/nvt_dataloader/train_torchrec",
        (_FUSED, _FUSED + _IMPORT),
        (
            "    sharders = cast(\n"
            "        List[ModuleSharder[nn.Module]],\n"
            "        [\n"
            "            FusedEmbeddingBagCollectionSharder(),\n"
            "        ],\n"
            "    )\n",
            f"    sharders = remote_sharders({_CLIENT})\n",
        ),
        runs={"SGD": ["rate=0.1"], "RowWiseAdagrad": ["rate=0.01", "adagrad=1"]},
    ),
    "transfer": _example(
        "examples/transfer_learning/train_from_pretrained_embedding",
        (_OF_BAGS, _OF_BAGS + _IMPORT),
        (
            "    sharders = cast(\n"
            "        List[ModuleSharder[nn.Module]],\n"
            "        [\n"
            "            EmbeddingBagCollectionSharder(\n",
            f"    sharders = remote_sharders({_CLIENT},\n",
        ),
        (
            "                }\n            )\n        ],\n    )\n",
            "                })\n",
        ),
    ),
    "bert4rec": _example(
        "examples/bert4rec/bert4rec_main",
        (
            "from torchrec.distributed.types import ModuleSharder\n",
            "from torchrec.distributed.types import ModuleSharder\n" + _IMPORT,
        ),
        (
            "            sharders=[\n"
            "                cast(ModuleSharder[nn.Module], "
            "EmbeddingCollectionSharder(fused_params))\n"
            "            ],\n        )\n        dense",
            f"            sharders=remote_sharders({_CLIENT}, "
            "fused_params=fused_params),\n        )\n        dense",
        ),
        packages=("pandas",),
    ),
    "installation": _example(
        "test_installation",
        (
            "from torchrec.models.dlrm import DLRM\n",
            "from torchrec.models.dlrm import DLRM\n" + _IMPORT,
        ),
        (
            "        module=model,\n        device=device,\n",
            "        module=model,\n        device=device,\n"
            f"        sharders=remote_sharders({_CLIENT}),\n",
        ),
    ),
}

_NOTEBOOK = "TorchRec_Interactive_Tutorial_Notebook_OSS_version.ipynb"
_IN_NOTEBOOK = f'        "{_OF_BAGS.strip()}\\n",\n'
_REMOTE = "RemoteEmbeddingBagCollectionSharder"

PROGRAMS = {
    **_EXAMPLES,
    "tutorial": replace(
        _EXAMPLES["golden"],
        driver="tutorial",
        patched_file=_NOTEBOOK,
        patch=(
            (
                _IN_NOTEBOOK,
                f"{_IN_NOTEBOOK}        "
                f'"from persia_torchrec import EmbeddingClient, {_REMOTE}\\n",\n',
            ),
            (
                '"sharder = EmbeddingBagCollectionSharder()',
                f'"sharder = {_REMOTE}({_CLIENT})',
            ),
            (
                " = EmbeddingBagCollectionSharder(fused_params=fused_params)",
                f" = {_REMOTE}({_CLIENT}, "
                "fused_params=fused_params, namespace='fused')",
            ),
            (
                "sharded_ebc_apply_opt = sharder.shard(",
                "sharded_ebc_apply_opt = "
                f"{_REMOTE}({_CLIENT}, namespace='in_backward').shard(",
            ),
        ),
        runs={"a step of RowWiseAdagrad": []},
    ),
    "recipes": Program(
        "facebookresearch/recipes",
        "fb47e159b67e9c062468f8e207fdfb873a652aa4",
        ".",
        "recipes",
        "torchrecipes/rec/modules/lightning_dlrm.py",
        (
            (
                "from torchrec.models.dlrm import DLRM, DLRMTrain\n",
                "from torchrec.models.dlrm import DLRM, DLRMTrain\n" + _IMPORT,
            ),
            (
                "            module=model,\n            device=device,\n",
                "            module=model,\n            device=device,\n"
                f"            sharders=remote_sharders({_CLIENT}),\n",
            ),
        ),
        {"LightningDLRM, fit with evaluation": []},
        packages=("pytorch-lightning==2.6.6",),
    ),
    "tnt": Program(
        "pytorch/tnt",
        "b83990d2e1c32ea78e49f5d464516abc26db1848",
        ".",
        "tnt",
        "examples/torchrec/main.py",
        (
            (
                "from torchrec.models.dlrm import DLRM, DLRMTrain\n",
                "from torchrec.models.dlrm import DLRM, DLRMTrain\n"
                "import os\n" + _IMPORT,
            ),
            (
                "        train_model, get_default_sharders(), dist.GroupMember.WORLD\n",
                f"        train_model, (sharders := remote_sharders({_CLIENT})), "
                "dist.GroupMember.WORLD\n",
            ),
            ("        plan=plan,\n", "        plan=plan, sharders=sharders,\n"),
        ),
        {"DLRM, fit with evaluation": []},
        packages=("torcheval==0.0.7",),
    ),
    "twhin": Program(
        "twitter/the-algorithm-ml",
        "b85210863f7a94efded0ef5c5ccf4ff42767876c",
        ".",
        "twhin",
        "model.py",
        (
            ("import torch\n", "import os\nimport torch\n" + _IMPORT),
            (
                "      module=model,\n      device=device,\n",
                "      module=model,\n      device=device,\n"
                f"      sharders=remote_sharders({_CLIENT}),\n",
            ),
        ),
        {"SGD by table": []},
        packages=(
            *("torchsnapshot==0.1.0", "nest_asyncio", "aiofiles", "aiohttp"),
            *("importlib-metadata", "zipp", "dm-tree", "attrs", "wrapt", "absl-py"),
            *("pydantic<2", "multidict", "yarl", "propcache", "frozenlist"),
            *("aiosignal", "aiohappyeyeballs", "idna"),
        ),
        saves_checkpoints=True,
    ),
    "dlrm": Program(
        "facebookresearch/dlrm",
        "090956ee2319ddd349a42232958aefccfe3f7b0a",
        "torchrec_dlrm",
        "dlrm",
        "dlrm_main.py",
        _DLRM_PATCH,
        {
            "SGD": SMALL,
            "Adagrad, warm-up and decay": [*SMALL, *ADAGRAD, *SCHEDULE],
            "DCN, multi-hot": [*SMALL, *DCN, HOT, UNIFORM, *ADAGRAD],
        },
    ),
    "mlcommons": Program(
        "mlcommons/training",
        "aa344c7f",
        "recommendation_v2/torchrec_dlrm",
        "dlrm",
        "dlrm_main.py",
        _DLRM_PATCH,
        {"DCN, Adagrad": [*SMALL, *DCN, *ADAGRAD, *EVALUATED]},
    ),
    "hstu": Program(
        "meta-recsys/generative-recommenders",
        "db1bf8f2e8f6a92a738dafd52a245eafb25a222b",
        ".",
        "hstu",
        "generative_recommenders/dlrm_v3/train/utils.py",
        _HSTU_PATCH,
        {
            "debug.gin, float32": [],
            "debug.gin, FP16 tables": ["tables=FP16"],
            "debug.gin, bfloat16 dense half": ["dense=bf16"],
        },
        packages=("triton==3.7.1", "gin-config==0.5.0", "pandas"),
        saves_checkpoints=True,
        most={
            "debug.gin, FP16 tables": 1e-4,
            "debug.gin, bfloat16 dense half": 1e-4,
        },
    ),
    "tzrec": Program(
        "alibaba/TorchEasyRec",
        "54cac3165a2adece9a932616463a5b6a2095b0ce",
        ".",
        "tzrec",
        "tzrec/utils/plan_util.py",
        _TZREC_PATCH,
        {
            title: [f"config={path}"]
            for title, path in {
                "DIN": "tzrec/tests/configs/multi_tower_din_mock.config",
                "DeepFM": "examples/deepfm_criteo.config",
                "MMoE": "examples/mmoe_taobao.config",
                "DBMTL, sequences": (
                    "tzrec/tests/configs/dbmtl_has_sequence_mock.config"
                ),
            }.items()
        },
        packages=(
            "triton==3.7.1",
            "protobuf<5",
            "tensorboard==2.19",
            "grpcio-tools<1.63",
            "pandas",
            "scipy",
            "scikit-learn",
            "joblib",
            "threadpoolctl",
            "narwhals",
            "safetensors",
            "anytree",
            "confluent-kafka",
            "pyodps==0.12.5.1",
            "alibabacloud_credentials",
            "alibabacloud_tea",
            "alibabacloud_credentials_api",
            "darabonba-core",
            "aiofiles",
            "APScheduler",
            "tzlocal",
        ),
        build=(
            "-m",
            "grpc_tools.protoc",
            "-I.",
            "--python_out=.",
            "tzrec/protos/*.proto",
            "tzrec/protos/models/*.proto",
        ),
        saves_checkpoints=True,
        most_of_metrics=1e-5,  # its AUC counts samples between thresholds
    ),
}
