"""Imports run downhill, and importing the package costs next to nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_dynspec

ROOT = Path(hf_dynspec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The rooms, files or folders of the package, from the lowest to the highest: each imports from those before it alone.
ROOMS = (
    "errors",
    "fields",
    "files",
    "forks",
    "vocabulary",
    "devices",
    "tree_config",
    "storable",
    "artifacts",
    "protocol",
    "kernels",
    "stats",
    "shortlists",
    "modeling",
    "cache_names",
    "memory",
    "drafters",
    "alignment",
    "drafting",
    "rounds",
    "loading",
    "generation",
    "assistant",
    "testing",
    "build",
    "evaluation",
    "commands",
)
# The climbs: the table of classes has the room imported whose classes it lists, and an assistant can be diagnosed.
CLIMBS = {("storable", "shortlists"), ("assistant.assistant", "evaluation")}
# Of the rooms that hold several implementations, a draft knows the contracts only.
CONTRACTS = {"drafters": "drafters.base", "shortlists": "shortlists.base"}
# transformers is none of their business; torch alone is (and triton, inside functions, for the kernels).
THIRD_PARTIES = {
    **{room: set() for room in ("errors", "fields", "files", "forks", "tree_config", "vocabulary")},
    **{room: {"torch"} for room in ("devices", "storable", "protocol", "modeling", "stats")},
    "artifacts": {"torch", "huggingface_hub", "safetensors"},
    "kernels": {"torch", "triton"},
    # The index of one policy is hnswlib's, and lies in the Hub's home folder; its cache weighs tokens in arrays.
    "shortlists": {"torch", "numpy", "hnswlib", "huggingface_hub"},
    # Adapters are peft's, their files safetensors, and commits the Hub's.
    "alignment": {"torch", "peft", "huggingface_hub", "safetensors"},
}
# A Triton kernel cannot be written without triton. The files with one are imported where they are of use, and lazily.
OF_TRITON = {f"kernels.triton_{name}" for name in ("attention", "best_rows", "blocks", "layers")}
LAZY_EVERYWHERE = {"triton", "peft", "hnswlib", "matplotlib", "pyarrow", "datasets", "faiss"}
PRIVATE_MODULES = ("transformers.generation.candidate_generator",)


def module_of(file: Path) -> str:
    """`generation.binding` for hf_dynspec/generation/binding.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.partition(".")[0]


def nodes(tree: ast.AST, lazily: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it is reached only when a function is called or types are checked."""
    for child in ast.iter_child_nodes(tree):
        inside = isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = inside or (isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test))
        yield child, lazily or inside
        yield from nodes(child, lazily or inside)


def imports(file: Path, source: str | None = None) -> Iterator[tuple[str, bool]]:
    """The absolute dotted names that a file imports (each name of a from-import), and whether lazily. An
    `import_module` of a constant counts."""
    package = ["hf_dynspec", *file.relative_to(ROOT).parent.parts]
    for node, lazily in nodes(ast.parse(file.read_text(encoding="utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, lazily
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", lazily
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, lazily


def own_modules(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a file imports: `shortlists.base` for `from .shortlists.base import X`."""
    known = {module_of(other) for other in FILES}
    for name, lazily in imports(file):
        if name.split(".")[0] == "hf_dynspec":
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in known:
                parts.pop()
            yield ".".join(parts), lazily


def third_parties(file: Path) -> Iterator[tuple[str, bool]]:
    for name, lazily in imports(file):
        top = name.split(".")[0]
        if top != "hf_dynspec" and top not in sys.stdlib_module_names:
            yield top, lazily


def test_the_walk_sees_what_it_looks_for():
    """Every rule below rests on this."""
    source = (
        "import torch\nfrom ..modeling.head import widen\nfrom . import base\nfrom .base import A, B\n"
        "def f():\n    from ..drafters import eagle\n    import triton.language\n"
        "    import_module('hf_dynspec.stats')\n"
    )
    seen = list(imports(ROOT / "shortlists" / "full.py", source))
    assert seen == [
        ("torch", False),
        ("hf_dynspec.modeling.head.widen", False),
        ("hf_dynspec.shortlists.base", False),
        ("hf_dynspec.shortlists.base.A", False),
        ("hf_dynspec.shortlists.base.B", False),
        ("hf_dynspec.drafters.eagle", True),
        ("triton.language", True),
        ("hf_dynspec.stats", True),
    ]
    assert len(FILES) > 20
    assert ("modeling.head", False) in own_modules(ROOT / "drafters" / "base.py")


def test_every_room_has_its_place_and_imports_run_downhill():
    assert {room_of(module_of(file)) for file in FILES} - {"", "__init__"} == set(ROOMS)
    climbs = set()
    for file in FILES:
        room = room_of(module_of(file))
        for module, lazily in own_modules(file):
            if room and module and ROOMS.index(room_of(module)) > ROOMS.index(room):
                climbs.add((module_of(file), room_of(module)))
                assert lazily, f"{module_of(file)} imports {module}, which is above it"
    assert climbs == CLIMBS


def circle_of(imported: dict[str, set[str]]) -> set[str]:
    """The modules that import each other, directly or through others, and the ones between them."""
    left = dict(imported)
    while free := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in free}
    while free := set(left) - {other for others in left.values() for other in others}:
        left = {name: others for name, others in left.items() if name not in free}
    return set(left)


def test_no_files_import_each_other():
    """Not even inside functions, but for the climbs."""
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"c"}}) == {"b", "c"}
    imported = {}
    for file in FILES:
        module = module_of(file)
        climbs = {room for name, room in CLIMBS if name == module}
        imported[module] = {other for other, _ in own_modules(file) if room_of(other) not in climbs} - {module, ""}
    del imported[""]
    assert circle_of(imported) == set()


@pytest.mark.parametrize("room", THIRD_PARTIES)
def test_low_rooms_stay_free_of_transformers(room):
    for file in FILES:
        if room_of(module_of(file)) == room:
            assert {name for name, _ in third_parties(file)} <= THIRD_PARTIES[room], file.name


def test_a_draft_knows_the_contracts_only():
    modules = {module for file in FILES if room_of(module_of(file)) == "drafting" for module, _ in own_modules(file)}
    assert {module for module in modules if room_of(module) in CONTRACTS} == set(CONTRACTS.values())


def test_heavy_optional_packages_are_imported_where_they_are_used():
    for file in FILES:
        for name, lazily in third_parties(file):
            allowed = lazily or name not in LAZY_EVERYWHERE or (name == "triton" and module_of(file) in OF_TRITON)
            assert allowed, f"{file.relative_to(ROOT)} imports {name} with itself"
        for module, lazily in own_modules(file):
            assert lazily or module not in OF_TRITON, f"{file.relative_to(ROOT)} imports {module} with itself"


def private_uses(file: Path, source: str | None = None) -> list[str]:
    """What a file uses of transformers that is not public: names that start with an underscore and modules that
    transformers does not document. Attributes of `self` and `cls` are the file's own."""
    source = file.read_text(encoding="utf-8") if source is None else source
    found = []
    for name, _ in imports(file, source):
        parts = name.split(".")
        private = any(part.startswith("_") for part in parts[1:])
        if parts[0] == "transformers" and (private or name.startswith(PRIVATE_MODULES)):
            found.append(name)
    models = {"target", "model", "drafter", "generation_config", "cache", "_target", "_cache", "_model"}
    for node, _ in nodes(ast.parse(source)):
        name = attribute = None
        if isinstance(node, ast.Attribute):
            name, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                name, attribute = node.args[0], node.args[1].value
        if attribute is None or not attribute.startswith("_") or attribute.startswith("__"):
            continue
        owner = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
        own = isinstance(name, ast.Name) and name.id in ("self", "cls")
        if owner in models and not own:
            found.append(f"{owner}.{attribute}")
    return found


# What other rooms ask of a model, for which there is no public name: of transformers, of torch's compiled wrapper, and
# of every module of torch.
TOLERATED = {"model._is_stateful", "model._orig_mod", "drafter._modules"}


def test_only_generation_uses_transformers_private_names():
    users = {module_of(file): found for file in FILES if (found := set(private_uses(file)) - TOLERATED)}
    assert {room_of(module) for module in users} == {"generation"}, users


def test_the_search_for_private_names_finds_them():
    source = (
        "from transformers.generation.candidate_generator import CandidateGenerator\n"
        "from transformers.generation.utils import _speculative_sampling\n"
        "def f(target, generation_config):\n    target._get_candidate_generator()\n"
        "    getattr(generation_config, '_mask_length', None)\n    self._target = 1\n"
    )
    assert private_uses(ROOT / "modeling" / "head.py", source) == [
        "transformers.generation.candidate_generator.CandidateGenerator",
        "transformers.generation.utils._speculative_sampling",
        "target._get_candidate_generator",
        "generation_config._mask_length",
    ]


# Cost ----------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, time
import transformers
start = time.process_time()
import hf_dynspec
seconds = time.process_time() - start
heavy = ("torch", "peft", "hnswlib", "triton", "matplotlib", "pyarrow", "faiss")
print(seconds, *[name for name in heavy if name in sys.modules])
"""


def run(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_is_cheap():
    alone = "import sys; import hf_dynspec; print(*[n for n in {names} if n in sys.modules])"
    heavy = ["torch", "transformers", "peft", "hnswlib", "triton", "matplotlib", "pyarrow", "faiss", "numpy"]
    assert run(alone.format(names=heavy)) == []
    # Of the processor, and the quickest of three, as other work on the machine can only slow it down.
    assert min(float(run(MEASURE)[0]) for _ in range(3)) < 0.3


def test_the_public_names_load_and_nothing_else_does():
    code = (
        "import sys, hf_dynspec\n"
        "assert all(getattr(hf_dynspec, name) is not None for name in hf_dynspec.__all__)\n"
        "assert set(hf_dynspec.__all__) <= set(dir(hf_dynspec))\n"
        "names = ['peft', 'hnswlib', 'triton', 'matplotlib', 'pyarrow', 'faiss', 'hf_dynspec.kernels.triton_blocks']\n"
        "print(*[n for n in names if n in sys.modules])"
    )
    # transformers' generation loads torch's compiler, and that loads triton where it is installed.
    others = "import sys; from transformers import GenerationMixin; print('triton' if 'triton' in sys.modules else '')"
    assert set(run(code)) <= set(run(others))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        hf_dynspec.Nonsense  # noqa: B018
