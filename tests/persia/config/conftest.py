from tests.support.yaml_configs import embedding_config, global_config  # noqa: F401
