"""No vendor's name outside a vendor's member: not in an identifier and not in a string of code that is for everyone.

Docstrings and comments are prose, which nothing can depend on; they may give examples. Everything else is split into
words (``snake_case``, ``camelCase``, punctuation) and compared.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_VENDOR_WORDS = """
    cuda nvidia nvcc nvml nvtx cudnn cublas cufile hip hipcc rocm rocr amd amdgpu kfd habana habanalabs gaudi synapse
    hpu intel xpu oneapi icpx sycl ipex ascend npu cann bisheng ccec davinci huawei sdaa tecorigin tecocc tecoai musa
    mthreads mlu cambricon mps tpu xla neuron
"""
VENDORS = frozenset(_VENDOR_WORDS.split())
# Words that configuration files, or torch itself, spell so: (file below the root, word) -> why.
ALLOWED: dict[tuple[str, str], str] = {}


def members():
    """Folders of Python code that is for everyone: core, the command line, examples, each member without a vendor."""
    found = [ROOT / "core/polyscale", ROOT / "entrypoints/polyscale_cli", ROOT / "docs/examples"]
    for project in sorted(
        [
            *ROOT.glob("accelerators/*/pyproject.toml"),
            *ROOT.glob("plugins/*/pyproject.toml"),
            *ROOT.glob("csrc/*/pyproject.toml"),
        ]
    ):
        if vendor(project.read_text()) is None:
            found += [folder for folder in sorted(project.parent.glob("polyscale_*")) if folder.is_dir()]
    return found


def vendor(pyproject):
    """``vendor`` of the table ``[tool.polyscale]``; read by hand, since Python 3.10 has no TOML reader."""
    section = re.search(r"^\[tool\.polyscale\]$(.*?)(?=^\[|\Z)", pyproject, re.MULTILINE | re.DOTALL)
    stated = re.search(r"^vendor\s*=\s*[\"'](.+?)[\"']", section.group(1), re.MULTILINE) if section else None
    return stated.group(1) if stated else None


def words(text):
    """Lower-case words of an identifier or a string."""
    spaced = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", spaced)}


def docstrings(tree):
    """Ids of the nodes that are docstrings (or strings that stand alone)."""
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in statements if isinstance(value, ast.Constant)}


def texts(tree):
    """(line, text) of every identifier and every string that is not a docstring."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str | bytes) and id(node) not in prose:
                yield line, node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module", "names", "rest"):
            value = getattr(node, field, None)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield line, text


def mentions(source):
    """(line, vendor word) pairs of a source text."""
    return sorted({(line, word) for line, text in texts(ast.parse(source)) for word in words(text) & VENDORS})


@pytest.mark.parametrize("member", members(), ids=lambda folder: folder.name)
def test_no_vendor_is_named_outside_a_vendors_member(member):
    files = sorted(member.rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in files
        for line, word in mentions(path.read_text())
        if (str(path.relative_to(ROOT)), word) not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_still_needed():
    for (file, word), reason in ALLOWED.items():
        assert reason
        assert word in {found for _, found in mentions((ROOT / file).read_text())}, f"{file} no longer says {word}"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("torch.cuda.synchronize()", "cuda"),
        ("device = 'cuda:0'", "cuda"),
        ("def is_npu_available(): ...", "npu"),
        ("class XpuThing: ...", "xpu"),
        ("class XPUThing: ...", "xpu"),
        ("import habana_frameworks", "habana"),
        ("from torch import hpu as h", "hpu"),
        ("f(use_rocm=1)", "rocm"),
        ("x = f'{y} on NVIDIA'", "nvidia"),
        ("x = {'CUDA_VISIBLE_DEVICES': 1}", "cuda"),
        ("global sdaa_state", "sdaa"),
        ("compiler = 'icpx'", "icpx"),
        ("run(['bisheng'])", "bisheng"),
        ("path = '/dev/davinci0'", "davinci"),
        ("synapse_version = 1", "synapse"),
    ],
)
def test_the_check_finds_names_in_code(source, word):
    assert word in {found for _, found in mentions(source)}


def test_the_check_leaves_prose_and_other_words_alone():
    source = '"""On cuda."""\n# for cuda\ndef ship(chip, amdahl):\n    "As in cuda."\n    return "shipping inputs"\n'
    assert mentions(source) == []


def test_members_without_a_vendor_are_read_and_vendors_are_not():
    names = [folder.name for folder in members()]
    everyone = {"polyscale", "polyscale_cli", "polyscale_cpu", "polyscale_standard", "polyscale_sim", "examples"}
    assert everyone <= set(names)
    assert not {f"polyscale_{name}" for name in ("cuda", "rocm", "hpu", "xpu", "npu", "sdaa", "cuda_ops")} & set(names)
