"""Asks an inference server by a client that was not written for it; prints JSON.

It runs in the environment of ``build/clients``, one client a process, as each registers
the same messages of gRPC:

    python protocol_clients.py CLIENT HTTP_URL GRPC_ADDRESS MODEL INPUTS

``CLIENT`` is a function below, and ``INPUTS`` as for ``stock_client.py``. What is
printed are the predictions of each way to ask, and the answers of probes.
"""

import asyncio
import json
import sys


def rest(url, _, model, inputs):
    """Ask by the client of REST that is generated from the protocol."""
    from open_inference.openapi.client import OpenInferenceClient
    from open_inference.openapi.types import InferenceRequest, RequestInput

    client = OpenInferenceClient(base_url=url)
    client.check_server_liveness()
    client.check_server_readiness()
    client.check_model_readiness(model)
    tensors = [
        RequestInput(name=name, datatype=datatype, shape=shape, data=numbers)
        for name, datatype, shape, numbers in flat(inputs)
    ]
    answer = client.model_infer(model, request=InferenceRequest(inputs=tensors))
    metadata = client.read_model_metadata(model)
    (output,) = answer.outputs
    return [metadata.name == model], [list(output.data.__root__)]


def rpc(_, address, model, inputs):
    """Ask by the client of gRPC that is generated from the protocol."""
    import grpc
    from open_inference.grpc import protocol
    from open_inference.grpc.service import GRPCInferenceServiceStub

    fields = {"FP32": "fp32", "FP64": "fp64", "INT64": "int64", "INT32": "int"}
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        probes = [
            stub.ServerLive(protocol.ServerLiveRequest()).live,
            stub.ServerReady(protocol.ServerReadyRequest()).ready,
            stub.ModelReady(protocol.ModelReadyRequest(name=model)).ready,
        ]
        tensors = [
            {
                "name": name,
                "datatype": datatype,
                "shape": shape,
                "contents": {f"{fields[datatype]}_contents": numbers},
            }
            for name, datatype, shape, numbers in flat(inputs)
        ]
        request = protocol.ModelInferRequest(model_name=model, inputs=tensors)
        answer = stub.ModelInfer(request)
    return probes, [floats(answer.raw_output_contents[0])]


def kserve(url, address, model, inputs):
    """Ask by the SDK of KServe, over REST and gRPC."""
    return asyncio.run(_kserve(url, address, model, inputs))


async def _kserve(url, address, model, inputs):
    import numpy as np
    from kserve import (
        InferenceGRPCClient,
        InferenceRESTClient,
        InferInput,
        InferRequest,
    )
    from kserve.inference_client import RESTConfig

    def request(*, is_binary):
        tensors = []
        for name, datatype, shape, numbers in flat(inputs):
            dtype = {"FP": "float", "IN": "int"}[datatype[:2]] + datatype[-2:]
            tensor = InferInput(name, shape, datatype)
            array = np.array(numbers, dtype).reshape(shape)
            tensor.set_data_from_numpy(array, binary_data=is_binary)
            tensors.append(tensor)
        return InferRequest(model, tensors)

    of_rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    of_grpc = InferenceGRPCClient(address)
    probes = [
        await of_rest.is_server_live(url),
        await of_rest.is_server_ready(url),
        await of_rest.is_model_ready(url, model),
        await of_grpc.is_server_live(),
        await of_grpc.is_server_ready(),
        await of_grpc.is_model_ready(model),
    ]
    answers = [
        await of_rest.infer(url, request(is_binary=False), model),
        await of_rest.infer(url, request(is_binary=True), model),
        await of_grpc.infer(request(is_binary=True)),
    ]
    await of_rest.close()
    await of_grpc.close()
    arrays = [answer.outputs[0].as_numpy() for answer in answers]
    return probes, [array.ravel().tolist() for array in arrays]


def flat(inputs):
    """Return name, datatype, shape and numbers, one after the other."""
    for name, datatype, _, shape, numbers in inputs:
        is_nested = isinstance(numbers[0], list)
        if is_nested:
            numbers = [number for row in numbers for number in row]
        yield name, datatype, shape, numbers


def floats(data):
    return memoryview(data).cast("f").tolist()


if __name__ == "__main__":
    asked, *where, given = sys.argv[1:]
    print(json.dumps(globals()[asked](*where, json.loads(given))))
