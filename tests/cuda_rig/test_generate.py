"""What is made of NVIDIA's headers, tried on small ones."""

from __future__ import annotations

from tests.cuda_rig.generate import generated, played, shapes

CUDA_H = """
#define cuA     cuA_v3
    CUDA_ERROR_BAD    = 1,
CUresult CUDAAPI cuA(int);
CUresult CUDAAPI cuA_v2(int);
CUresult CUDAAPI cuB(int);
"""
TYPEDEFS = """
typedef CUresult (CUDAAPI *PFN_cuA_v2000)(int);
typedef CUresult (CUDAAPI *PFN_cuA_v12000)(int);
typedef CUresult (CUDAAPI *PFN_cuB_v2000)(int);
"""


def test_shapes() -> None:
    """The newest version of a function has its newest name, and one that the types leave out is the oldest."""
    found = [shape for shape in shapes(CUDA_H, TYPEDEFS) if shape[0] != "cuGraphInstantiate"]
    assert found == [("cuA", 12000, "cuA_v3"), ("cuA", 2000, "cuA_v2")]


def test_functions() -> None:
    """Each function of the header is either defined in the sources or generated."""
    sources = ["CUresult cuA_v3(int a) {\n  return cuB(a);\n}\n"]
    assert played(sources) == {"cuA_v3"}
    text = generated(CUDA_H, TYPEDEFS, sources)
    assert [name for name in ("cuA", "cuA_v2", "cuA_v3", "cuB") if f"int {name}()" in text] == ["cuA", "cuA_v2", "cuB"]
    assert 'case 1: return "CUDA_ERROR_BAD";' in text
