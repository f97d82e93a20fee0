"""TLS of the inference server, over HTTPS and gRPC, with a certificate made here."""

import http.client
import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.serving.grpc_server import MESSAGES, GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.item_model import INPUTS, version_of
from tests.support.processes import DEADLINE_S
from tests.support.servers import Servers

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no command openssl"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the files of a certificate of 127.0.0.1 and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    return make_pair(folder / "cert.pem", folder / "key.pem")


def make_pair(cert, key):
    words = "req -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    files = "-keyout", str(key), "-out", str(cert)
    names = "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words.split(), *files, *names],
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return str(cert), str(key)


@pytest.fixture(scope="module")
def served(pair):
    with Servers() as servers:
        client = servers.client(servers.start(1))
        models = Models()
        models.add("model").add(version_of(client, 1.5))
        config = HttpConfig(grpc_port=0, tls_cert=pair[0], tls_key=pair[1])
        https, rpc = PredictionServer(models, config), GrpcServer(models, config)
        yield https, rpc
        rpc.close()
        https.close()
        models.close()


def infer(address, context):
    request = urllib.request.Request(
        f"{address}/v2/models/model/infer", json.dumps({"inputs": INPUTS}).encode()
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as answer:
        return json.load(answer)["outputs"][0]["data"]


def test_a_client_that_trusts_the_certificate_is_answered_over_https(served, pair):
    address = served[0].address
    assert address.startswith("https://127.0.0.1:")
    assert infer(address, ssl.create_default_context(cafile=pair[0])) == [3.0]


def test_who_does_not_trust_it_or_speaks_no_tls_gets_nothing(served, pair):
    address = served[0].address
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        infer(address, ssl.create_default_context())
    plain = address.replace("https", "http")
    with pytest.raises((OSError, http.client.HTTPException)):
        infer(plain, None)
    assert infer(address, ssl.create_default_context(cafile=pair[0])) == [3.0]


def call(channel):
    ask = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        MESSAGES["ModelInferRequest"].SerializeToString,
        MESSAGES["ModelInferResponse"].FromString,
    )
    contents = {"int64_contents": [7]}
    item = {"name": "item", "datatype": "INT64", "shape": [1], "contents": contents}
    request = MESSAGES["ModelInferRequest"](model_name="model", inputs=[item])
    answer = ask(request, timeout=DEADLINE_S)
    return np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()


def test_grpc_takes_the_same_certificate(served, pair):
    address = f"127.0.0.1:{served[1].port}"
    trusted = grpc.ssl_channel_credentials(Path(pair[0]).read_bytes())
    with grpc.secure_channel(address, trusted) as channel:
        assert call(channel) == [3.0]
    unknown = grpc.secure_channel(address, grpc.ssl_channel_credentials())
    for refused in (unknown, grpc.insecure_channel(address)):
        with refused as channel, pytest.raises(grpc.RpcError) as caught:
            call(channel)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_files_that_are_not_a_pair_are_rejected(pair, tmp_path):
    (_, other) = make_pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    (tmp_path / "text.pem").write_text("no certificate")
    for cert, key in (
        (pair[0], other),
        (str(tmp_path / "text.pem"), pair[1]),
        (str(tmp_path / "absent.pem"), pair[1]),
    ):
        config = HttpConfig(grpc_port=0, tls_cert=cert, tls_key=key)
        for kind in (PredictionServer, GrpcServer):
            with pytest.raises(ConfigError, match="tls_cert and tls_key must be"):
                kind(Models(), config)
    with pytest.raises(ConfigError, match="must be given together"):
        HttpConfig(tls_cert=pair[0])
