"""Asks an inference server by the clients of Triton; prints what they return, as JSON.

It runs in an environment of its own, with ``tritonclient[http,grpc]``:

    python stock_client.py HTTP_ADDRESS GRPC_ADDRESS MODEL INPUTS

``INPUTS`` is JSON: a list of name, datatype, NumPy's dtype, shape and numbers of each.
"""

import json
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException


def main(http, grpc, model, inputs):
    of_http = tritonclient.http, tritonclient.http.InferenceServerClient(http)
    of_grpc = tritonclient.grpc, tritonclient.grpc.InferenceServerClient(grpc)
    found = {
        "http": ask(*of_http, model, json.loads(inputs), {}),
        "http as JSON": infer(
            *of_http, model, json.loads(inputs), {"binary_data": False}
        ),
        "http as gzip": infer(
            *of_http,
            model,
            json.loads(inputs),
            {},
            request_compression_algorithm="gzip",
        ),
        "grpc": ask(*of_grpc, model, json.loads(inputs), {"as_json": True}),
    }
    print(json.dumps(found))


def ask(module, client, model, inputs, as_json):
    """Return what each call of a client returns."""
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model ready": client.is_model_ready(model),
        "server": client.get_server_metadata(**as_json)["name"],
        "inputs": client.get_model_metadata(model, **as_json)["inputs"],
        "config": config(client.get_model_config(model, **as_json)),
        "index": index(client.get_model_repository_index(**as_json)),
        "infer": infer(module, client, model, inputs, {}),
        "stats": client.get_inference_statistics(model, **as_json)["model_stats"][0][
            "name"
        ],
        "unknown model": error(lambda: infer(module, client, "other", inputs, {})),
        "no input": error(lambda: infer(module, client, model, inputs[1:], {})),
        "load": error(lambda: client.load_model(model)),
        "shared memory": error(client.get_system_shared_memory_status),
    }


def config(answer):
    return answer.get("config", answer)["name"]


def index(answer):
    models = answer["models"] if isinstance(answer, dict) else answer
    return [[one["name"], one["version"], one["state"]] for one in models]


def infer(module, client, model, inputs, how, **settings):
    """Return the predictions, flat, and the id of the answer."""
    tensors = []
    for name, datatype, dtype, shape, numbers in inputs:
        tensor = module.InferInput(name, shape, datatype)
        array = np.array(numbers, dtype).reshape(shape)
        tensors.append(tensor.set_data_from_numpy(array, **how))
    outputs = [module.InferRequestedOutput("predictions", **how)]
    answer = client.infer(model, tensors, outputs=outputs, request_id="7", **settings)
    response = answer.get_response()
    number = response["id"] if isinstance(response, dict) else response.id
    return answer.as_numpy("predictions").ravel().tolist(), number


def error(call):
    """Return the text of the error that a call raises."""
    try:
        call()
    except InferenceServerException as exc:
        return exc.message()
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
