"""ONNX models, made by the `onnx` library."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, struct_pb2
from onnx import helper, numpy_helper

from tensorcas_mlflow.file_formats import PlainBytes, Tensor
from tensorcas_mlflow.file_formats._onnx import is_onnx
from tests.file_formats.parts import damaged, joined, take_apart, tensors

WEIGHTS = np.random.default_rng(0).normal(size=(4, 5, 30)).astype(np.float32)


def graph(
    initializers: Sequence[onnx.TensorProto] = (), nodes: Sequence[onnx.NodeProto] = (), **more: object
) -> onnx.GraphProto:
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 4]) for name in "xy"]
    nodes = nodes or [helper.make_node("Identity", ["x"], ["y"])]
    return helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers, **more)


def model(initializers: Sequence[onnx.TensorProto] = (), nodes: Sequence[onnx.NodeProto] = (), **more: object) -> bytes:
    return helper.make_model(graph(initializers, nodes), producer_name="tests", **more).SerializeToString()


def with_floats(name: str, array: np.ndarray) -> onnx.TensorProto:
    return helper.make_tensor(name, onnx.TensorProto.FLOAT, array.shape, array.ravel())


def field(number: int, data: bytes) -> bytes:
    """Write one field of bytes, of fewer than 16 KiB."""
    return bytes([number << 3 | 2, len(data) & 127 | 128, len(data) >> 7]) + data


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float32", "float64", "complex64", "complex128", "bool", "bfloat16", "float8_e4m3fn"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ],
)
def test_an_initializer_has_its_name_dtype_shape_and_bytes(dtype: str) -> None:
    array = WEIGHTS.astype(getattr(ml_dtypes, dtype, dtype))
    data = model([numpy_helper.from_array(array, "encoder.weight")])

    ((name, (part, taken)),) = tensors(data).items()

    assert (name, part.dtype, part.shape, taken) == ("encoder.weight", dtype, array.shape, array.tobytes())
    assert joined(take_apart(data)) == data


def test_elements_smaller_than_a_byte_have_no_dtype() -> None:
    data = model([numpy_helper.from_array(WEIGHTS.astype(ml_dtypes.int4), "packed")])

    part, taken = tensors(data)["packed"]

    assert (part.dtype, part.shape, len(taken)) == (None, None, WEIGHTS.size // 2)


def test_typed_float_fields_of_onnx_are_tensors_even_ahead_of_their_name() -> None:
    doubles = helper.make_tensor("doubles", onnx.TensorProto.DOUBLE, [600], WEIGHTS.ravel())
    pairs = onnx.TensorProto(name="pairs", data_type=onnx.TensorProto.COMPLEX64, dims=[300], float_data=WEIGHTS.ravel())
    data = model([with_floats("floats", WEIGHTS), doubles, pairs])

    found = tensors(data)

    assert (found["floats"][0].dtype, found["floats"][0].shape) == ("float32", WEIGHTS.shape)
    assert found["floats"][1] == WEIGHTS.tobytes()
    assert (found["doubles"][0].dtype, found["doubles"][1]) == ("float64", WEIGHTS.astype("f8").tobytes())
    assert (found["pairs"][0].dtype, found["pairs"][0].shape) == ("complex64", (300,))


def test_integers_that_are_no_raw_data_stay_in_the_skeleton() -> None:
    data = model([helper.make_tensor("n", onnx.TensorProto.INT64, [1000], range(1000)), with_floats("w", WEIGHTS)])

    assert list(tensors(data)) == ["w"]


def test_small_tensors_stay_in_the_skeleton() -> None:
    data = model([numpy_helper.from_array(WEIGHTS[0, 0, :10], "bias"), numpy_helper.from_array(WEIGHTS, "weight")])

    assert list(tensors(data)) == ["weight"]


def test_a_constant_is_named_after_the_output_of_its_node() -> None:
    constant = helper.make_node("Constant", [], ["scale", "unused"], value=numpy_helper.from_array(WEIGHTS))
    data = model(nodes=[constant])

    part, taken = tensors(data)["scale"]

    assert (part.dtype, part.shape, taken) == ("float32", WEIGHTS.shape, WEIGHTS.tobytes())


def test_tensors_of_subgraphs_and_functions_are_found() -> None:
    branch = graph([numpy_helper.from_array(WEIGHTS[0], "inner")])
    choice = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=graph())
    constant = helper.make_node("Constant", [], ["of_function"], value=numpy_helper.from_array(WEIGHTS[1]))
    function = helper.make_function("ours", "f", [], ["of_function"], [constant], [])

    found = tensors(model(nodes=[choice], functions=[function]))

    assert found["inner"][1] == WEIGHTS[0].tobytes()
    assert found["of_function"][1] == WEIGHTS[1].tobytes()


def test_sparse_tensors_are_found() -> None:
    values = numpy_helper.from_array(WEIGHTS[0].ravel(), "sparse")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.arange(150)), [1000])
    data = helper.make_model(graph(sparse_initializer=[sparse])).SerializeToString()

    assert tensors(data)["sparse"][1] == WEIGHTS[0].tobytes()


def test_the_data_of_tree_ensembles_is_skeleton() -> None:
    n_nodes = 5000
    trees = helper.make_node(
        *("TreeEnsembleRegressor", ["x"], ["y"]),
        domain="ai.onnx.ml",
        nodes_values=[0.5] * n_nodes,
        nodes_treeids=list(range(n_nodes)),
        nodes_modes=["BRANCH_LEQ"] * n_nodes,
    )
    data = model([numpy_helper.from_array(WEIGHTS, "w")], [trees])

    assert list(tensors(data)) == ["w"]
    assert joined(take_apart(data)) == data


def test_tensors_are_found_beyond_what_is_looked_at_in_one_go() -> None:
    arrays = {f"layer.{i}": np.full(100_000 + i, i, np.float32) for i in range(12)}
    data = model([numpy_helper.from_array(array, name) for name, array in arrays.items()], doc_string="m" * 3000)

    found = tensors(data)

    assert {name: taken for name, (_, taken) in found.items()} == {name: a.tobytes() for name, a in arrays.items()}


@pytest.mark.parametrize("n_before", range(0, 200, 7))
def test_a_field_may_lie_anywhere_across_what_is_looked_at(n_before: int) -> None:
    filler = onnx.StringStringEntryProto(key="k", value="v" * ((1 << 20) - 250 + n_before))
    node = onnx.NodeProto(op_type="Identity", input=["x"], output=["y"], metadata_props=[filler])
    data = model([numpy_helper.from_array(WEIGHTS, "weight_with_a_long_name" * 3)], [node])

    assert tensors(data)["weight_with_a_long_name" * 3][1] == WEIGHTS.tobytes()


def test_dimensions_may_be_packed() -> None:
    tensor = numpy_helper.from_array(WEIGHTS, "w")
    tensor.ClearField("dims")
    packed = field(1, bytes(WEIGHTS.shape)) + tensor.SerializeToString()
    data = b"\x08\x08" + field(7, field(5, packed))

    assert onnx.load_from_string(data).graph.initializer[0].dims == list(WEIGHTS.shape)
    assert tensors(data)["w"][0].shape == WEIGHTS.shape


def test_a_shape_that_contradicts_the_bytes_is_left_out() -> None:
    tensor = numpy_helper.from_array(WEIGHTS, "w")
    tensor.dims[0] = 1000

    part, taken = tensors(model([tensor]))["w"]

    assert (part.dtype, part.shape, taken) == ("float32", None, WEIGHTS.tobytes())


def test_a_field_that_goes_beyond_its_message_ends_the_walk() -> None:
    data = model([numpy_helper.from_array(WEIGHTS, "w")])
    at = data.index(WEIGHTS.tobytes()) - 2
    boasting = data[:at] + b"\xff\x7f" + data[at + 2 :]

    parts = take_apart(boasting)

    assert joined(parts) == boasting
    assert not any(isinstance(part, Tensor) for part, _ in parts)


def test_messages_that_lie_too_deep_are_passed() -> None:
    inner = graph([numpy_helper.from_array(WEIGHTS, "inner")])
    for _ in range(30):  # protobuf itself reads messages that lie in 100 others, and three are one step here
        inner = graph(nodes=[helper.make_node("Loop", ["x"], ["y"], body=inner)])
    data = helper.make_model(inner).SerializeToString()

    assert joined(take_apart(data)) == data
    assert tensors(data) == {}


def test_a_file_of_nothing_but_tiny_fields_is_not_walked_for_ever() -> None:
    data = b"\x08\x08\x3a\xff\xff\xff\x7f\x0a\xff\xff\xff\x0f" + b"\x12\x00" * 300_000

    parts = take_apart(data)

    assert joined(parts) == data
    assert isinstance(parts[-1][0], PlainBytes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08",
        b"\x08\x01",
        b"\x08\x01\x12\x04\xff\xfe\xfd\xfc" + bytes(100),
        b"\x08\x01\x12\x81\x40" + bytes(5000),  # TensorFlow's SavedModel: a version, and a message
        b"\x08\x04\x12\x10" + b"d" * 16 + b"\x52\x00",  # Core ML: the same, and a field that no model has
        struct_pb2.Struct(fields={"a": struct_pb2.Value(number_value=1)}).SerializeToString(),
        descriptor_pb2.FileDescriptorProto(name="a.proto", package="a").SerializeToString(),
        bytes(5000),
        b"\x08\x01" + b"\xff" * 5000,
    ],
)
def test_other_files_are_not_taken_for_a_model(data: bytes) -> None:
    assert not is_onnx(memoryview(data))


def test_random_bytes_are_not_taken_for_a_model() -> None:
    draw = np.random.default_rng(0)
    heads = draw.integers(0, 256, (20_000, 64), dtype=np.uint8)
    heads[:, 0] = 8
    heads[:, 1] %= 128

    taken = sum(is_onnx(memoryview(head.tobytes())) for head in heads)

    assert taken < len(heads) / 500


def test_damaged_files_come_back() -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(WEIGHTS[0]))
    data = model([numpy_helper.from_array(WEIGHTS[1], "w"), with_floats("f", WEIGHTS[2])], [constant])

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken
