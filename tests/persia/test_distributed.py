import inspect

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.distributed import (
    ALGORITHMS,
    REJECTED_ALGORITHMS,
    BaguaDistributedOption,
    DDPOption,
    get_default_distributed_option,
)


def test_both_of_persias_names_say_how_trainers_meet():
    by_code = DDPOption("file", sync_file="/shared/file")
    by_documentation = DDPOption(init_method="file", sync_file="/shared/file")
    assert by_code.initialization_method == by_documentation.initialization_method
    assert by_code.sync_file == by_documentation.sync_file == "/shared/file"
    assert DDPOption(init_method="tcp").sync_file is None


def test_without_an_option_the_backend_follows_the_device():
    assert get_default_distributed_option(None).backend == "gloo"
    assert get_default_distributed_option(0).backend == "nccl"
    assert get_default_distributed_option(0) == DDPOption()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mpi"}, "backend must be one of nccl, gloo. Received: 'mpi'"),
        ({"init_method": "env"}, "initialization_method must be one of tcp, file"),
        (
            {"initialization_method": "file", "init_method": "tcp"},
            "two names of one setting",
        ),
        ({"initialization_method": "file"}, "sync_file must be given with"),
        ({"sync_file": "/a"}, "sync_file must be given with .*only then"),
        (
            {"init_method": "file", "sync_file": "/a", "master_port": 1},
            "master_addr and master_port must not be given",
        ),
        ({"master_port": 0}, r"master_port must be in \[1, 65535\]. Received: 0"),
    ],
)
def test_ddp_options_that_cannot_work_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DDPOption(**arguments)


@pytest.mark.parametrize("algorithm", REJECTED_ALGORITHMS)
def test_an_algorithm_without_an_equivalent_is_rejected_with_what_to_use(algorithm):
    with pytest.raises(ConfigError, match=r"PyTorch has no equivalent\. Use '"):
        BaguaDistributedOption(algorithm)


def test_an_unknown_algorithm_is_rejected():
    with pytest.raises(ConfigError, match="algorithm must be one of gradient_allred"):
        BaguaDistributedOption("allreduce")


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        ("async", {"averaging_period": 0}, "averaging_period must be >= 1"),
        ("bytegrad", {"averaging_period": 2}, "left out unless the algorithm is 'as"),
        ("bytegrad", {"default_bucket_size": 0}, "must be >= 1 byte"),
        ("async", {"default_bucket_size": 5}, "left out with 'async', which sends no"),
        ("bytegrad", {"autotune_level": 1}, "autotune_level must be 0. Received: 1"),
        ("bytegrad", {"enable_bagua_net": True}, "enable_bagua_net must be False"),
    ],
)
def test_settings_that_bagua_alone_could_honour_are_rejected(
    algorithm, arguments, message
):
    with pytest.raises(ConfigError, match=message):
        BaguaDistributedOption(algorithm, **arguments)


def test_the_settings_of_bagua_have_persias_defaults():
    parameters = inspect.signature(BaguaDistributedOption).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults["algorithm"] is inspect.Parameter.empty
    expected = {
        "default_bucket_size": 10 * 1024**2,
        "autotune_level": 0,
        "bagua_service_port": 29501,
        "autotune_max_samples": 60,
        "autotune_warmup_time": 30,
        "is_output_autotune_log": False,
        "autotune_sampling_confidence_time": 5.0,
        "enable_bagua_net": False,
    }
    assert expected.items() <= defaults.items()
    for algorithm in ALGORITHMS:
        BaguaDistributedOption(algorithm, **expected)  # what is typed out is accepted


@pytest.mark.parametrize(("algorithm", "period"), [("async", 4), ("decentralized", 1)])
def test_weights_are_averaged_at_every_step_or_every_fourth(algorithm, period):
    option = BaguaDistributedOption(algorithm)
    assert option.period == period


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_gradients_are_averaged_instead_of_weights(algorithm):
    assert BaguaDistributedOption(algorithm).period is None
