from tests.support.yaml_configs import embedding_config  # noqa: F401
