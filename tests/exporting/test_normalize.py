"""Graphs of exported programs are converted to a known form."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from bertserve.export.graph import onnx_files
from bertserve.export.graph.normalize import normalize
from bertserve.export.inference import Feed, open_cpu_session

pytestmark = pytest.mark.torch


def feed() -> Feed:
    """Returns two rows of 11 tokens; the second row has padding on the right."""
    mask = np.ones((2, 11), dtype=np.int64)
    mask[1, 8:] = 0
    return {"input_ids": np.arange(22).reshape(2, 11), "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


def run(model: ir.Model, path: Path) -> NDArray[np.float32]:
    path.write_bytes(ir.to_proto(model).SerializeToString())
    session = open_cpu_session(path)
    output: NDArray[np.float32] = session.run(None, {value.name: feed()[value.name] for value in session.get_inputs()})[0]
    return output


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


EXPORTED = """<ir_version: 9, opset_import: ["" : 18]>
exported (int64[rows,length] input_ids, int64[rows,length] attention_mask, int64[rows,length] token_type_ids) => (float[rows,length,2] y)
<int64 zero = {0}, int64[1] last = {2}, float[1,2] plane = {1, 2}, float[2] scale = {3, 4}, float tiny = {1e-12}>
{
  rows = Shape <start = 0, end = 1> (token_type_ids)
  length = Shape <start = 1, end = 2> (attention_mask)
  shape = Concat <axis = 0> (rows, length)
  zeros = Expand (zero, shape)
  sum = Add (input_ids, zeros)
  float = Cast <to = 1> (sum)
  column = Unsqueeze (float, last)
  hidden = MatMul (column, plane)
  added = Add (hidden, tiny)
  y = LayerNormalization <axis = -1> (added, scale)
}"""


TIED = """<ir_version: 9, opset_import: ["" : 18]>
tied (int64[rows,length] input_ids) => (float[rows,length,3] y)
<float[3,2] table = {1, 2, 3, 4, 5, 6}>
{
  x = Gather (table, input_ids)
  turned = Transpose <perm = [1, 0]> (table)
  y = MatMul (x, turned)
}"""


def test_an_exported_program_gets_a_known_form(tmp_path: Path) -> None:
    """Sizes come from the first input's shape, a filled shape is one node, and norms have a shift. Unused nodes and inputs are removed.

    The addition of 1e-12 stays, which onnxscript's own optimizer treats as 0.
    """
    model = ir.from_proto(onnx.parser.parse_model(EXPORTED))
    before = run(model, tmp_path / "before.onnx")
    model.graph[0].metadata_props["stack_trace"] = "/a/path"
    model.graph[0].doc_string = "/a/path"
    normalize(model)
    onnx_files.save(model, tmp_path / "saved.onnx")
    after = ir.load(tmp_path / "saved.onnx")

    assert [value.name for value in after.graph.inputs] == ["input_ids"]
    expected = {"Shape": 1, "Gather": 2, "Unsqueeze": 3, "ConstantOfShape": 1, "Expand": 0, "Add": 2}
    assert {name: operators(after)[name] for name in expected} == expected
    assert after.graph[-1].inputs[2].const_value.numpy().tolist() == [0, 0]
    assert b"/a/path" not in (tmp_path / "saved.onnx").read_bytes()
    np.testing.assert_array_equal(before, run(after, tmp_path / "after.onnx"))


@pytest.mark.parametrize(("rows", "width"), [(3, 2), (2000, 150)])
def test_a_transposed_table_is_folded_even_if_the_table_is_also_used(rows: int, width: int) -> None:
    """A projection onto the vocabulary that is tied to the embedding becomes a product with a constant, which int8 supports.

    Onnxscript does not fold a constant of more than 512 x 512 values whose source is still used.
    """
    model = ir.from_proto(onnx.parser.parse_model(TIED.replace("length,3] y", f"length,{rows}] y")))
    table = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    model.graph.initializers["table"].const_value = ir.tensor(table)
    model.graph.initializers["table"].shape = ir.Shape(table.shape)
    normalize(model)
    [product] = [node for node in model.graph if node.op_type == "MatMul"]

    assert operators(model) == {"Gather": 1, "MatMul": 1}
    np.testing.assert_array_equal(table.T, product.inputs[1].const_value.numpy())
