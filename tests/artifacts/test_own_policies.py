"""Policies whose classes are written elsewhere: on a command line, in an artifact, and where nobody knows them."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from models import EOS, VOCABULARY, perturbed, prompt, tiny
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_dynspec import ArtifactError, ConfigurationError, DynSpecAssistant
from hf_dynspec.artifacts import read_artifact, rebuild_policy, render_card, write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.artifacts.tensors import digest_bytes
from hf_dynspec.commands import app
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.shortlists import (
    POLICIES,
    FullShortlist,
    HybridShortlist,
    UnionShortlist,
    as_policy,
    policy_class,
    register_policy,
)
from hf_dynspec.vocabulary import TokenizerFingerprint

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "examples" / "pocket"
TOKENIZER = TokenizerFingerprint(VOCABULARY, "0" * 64, (EOS,))
FAVOURITES = torch.tensor([5, 9, 2, 44])

# A policy as somebody writes it: the tokens that its user likes best, and the first `extra` ids.
MODULE = """
import torch

from hf_dynspec.protocol import Shortlist
from hf_dynspec.shortlists import ShortlistPolicy, ShortlistState, TensorRule, WholeNumber, register_policy, token_ids


class FavouritesState(ShortlistState):
    def __init__(self, ids):
        self.shortlist = Shortlist(ids, version=0)

    def select(self, depth, token_ids, features):
        return self.shortlist


@register_policy
class Favourites(ShortlistPolicy):
    name = "favourites"
    setting_rules = {"extra": WholeNumber(0)}
    tensor_rules = {"favourites": token_ids()}
    card_summary = "The tokens that somebody likes best."
    card_tags = ("liked",)

    def __init__(self, favourites=None, extra=8):
        self.require_settings({"extra": extra})
        self.favourites, self.extra = favourites, extra

    def start(self, vocabulary):
        ids = [*vocabulary.eos_token_ids, *range(self.extra)]
        ids += [] if self.favourites is None else self.favourites.tolist()
        return FavouritesState(torch.tensor(list(dict.fromkeys(ids)), device=vocabulary.device))

    def settings(self):
        return {"extra": self.extra}

    def tensors(self):
        return {} if self.favourites is None else {"favourites": self.favourites}


class Undeclared(Favourites):
    name = "undeclared"
    tensor_rules = {}


class Unfinished(ShortlistPolicy):
    name = "unfinished"


class Nameless(Favourites):
    name = None


SOMETHING = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder holds a package of somebody's own, which nobody has imported yet."""
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "policies.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != ""])
    before = dict(POLICIES)
    yield tmp_path
    POLICIES.clear()
    POLICIES.update(before)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("somebodys", "broken", "favourites")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def target():
    return tiny("qwen3")


def favourites(own: Path, **arguments):
    """The class's policy, imported as the command line does."""
    made = parse_policy("somebodys.policies:Favourites")
    return type(made)(**arguments)


def run_python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """In a process of its own, whose path does not hold the current folder unless `code` adds it."""
    script = cwd / "scripts" / "run.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


# --- On a command line ---


def test_a_class_of_ones_own_is_made_from_its_text(own):
    policy = parse_policy("somebodys.policies:Favourites:extra=3")
    assert (type(policy).__qualname__, policy.extra) == ("Favourites", 3)
    assert parse_policy("somebodys.policies:Favourites").extra == 8
    # It registered itself: its name is enough from now on, as for the package's own.
    assert parse_policy("favourites:extra=2").extra == 2 and as_policy("favourites").extra == 8


@pytest.mark.parametrize(
    "text",
    ["hybrid+somebodys.policies:Favourites:extra=3", "somebodys.policies:Favourites:extra=3+hybrid"],
)
def test_a_class_of_ones_own_joins_others(own, text):
    union = parse_policy(text)
    assert isinstance(union, UnionShortlist) and {policy.name for policy in union.policies} == {"hybrid", "favourites"}
    assert next(policy for policy in union.policies if policy.name == "favourites").extra == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "nowhere.at_all:Favourites",
            r"nowhere\.at_all:Favourites: the module cannot be imported: ModuleNotFoundError",
        ),
        ("somebodys.absent:Favourites", r"cannot be imported: ModuleNotFoundError.*Install it, or run the command in"),
        ("broken:Favourites", "cannot be imported: RuntimeError: not today"),
        ("somebodys.policies:Favorites", "the module somebodys.policies has no Favorites"),
        ("somebodys.policies:SOMETHING", "3 is not a subclass of ShortlistPolicy"),
        ("somebodys.policies:FavouritesState", "is not a subclass of ShortlistPolicy"),
        ("somebodys.policies:Unfinished", "the class lacks start"),
        ("somebodys.policies:Nameless", r'Nameless\.name must be lower-case.*write name = "my_policy"'),
        ("somebodys.policies:Favourites:extra", "settings are written name=value, got 'extra'"),
        ("somebodys.policies:Favourites:", "settings are written name=value, got ''"),
        ("somebodys.policies:Favourites:window=3", "favourites has no setting 'window'; it has favourites, extra"),
        ("somebodys.policies:Favourites:extra=-1", "extra must be a whole number from 0"),
        ("somebodys.policies", r"there is no policy 'somebodys.policies'.*written package\.module:Class"),
        ("os.path:join", "is not a subclass of ShortlistPolicy"),
        ("hybrid:core_size", "settings are written name=value, got 'core_size'"),
    ],
)
def test_what_is_no_policy_of_ones_own_is_refused(own, text, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


def test_a_plus_sign_in_a_path_still_joins_nothing(own):
    with pytest.raises(
        ArtifactError, match=r"^policy frequency:ranking=runs/a\+B2: .*there is no folder 'runs/a\+B2'"
    ):
        parse_policy("frequency:ranking=runs/a+B2")


@pytest.mark.process
def test_bench_takes_a_class_of_the_current_folder(own):
    # The pocket pair's own prompts; a script elsewhere, so that nothing but the command makes the folder importable.
    code = "import sys; from hf_dynspec.commands import main; assert '' not in sys.path; main()"
    words = ["bench", "--target", str(POCKET / "target"), "--drafter", str(POCKET / "drafter")]
    words += ["--prompts", str(POCKET / "prompts.jsonl"), "--policy", "somebodys.policies:Favourites:extra=40"]
    words += "--skip-coverage --limit 1 --max-new-tokens 4 --repeats 1 --profile-prompts 1 --threads 1".split()
    done = run_python(code, *words, "--no-transformers-assisted", "--json", "out.json", cwd=own)
    assert done.returncode == 0, done.stderr
    described = json.loads((own / "out.json").read_text())["policies"]
    assert described == {
        "somebodys.policies:Favourites:extra=40": {"name": "favourites", "settings": {"extra": 40}, "tensors": {}}
    }
    missing = CliRunner().invoke(app, [*words, "--policy", "somebodys.nothing:Favourites"])
    assert missing.exit_code == 1 and isinstance(missing.exception, ConfigurationError) and missing.output == ""
    assert str(missing.exception).startswith("policy somebodys.nothing:Favourites: the module cannot be imported")


# --- In an artifact ---


def test_a_registered_class_is_saved_and_loaded(own, target, tmp_path):
    policy = favourites(own, favourites=FAVOURITES, extra=60)
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=TOKENIZER)
    folder = write_artifact(tmp_path / "artifact", config, policy.tensors())
    again = rebuild_policy(*read_artifact(folder))
    assert type(again) is type(policy) and again.settings() == policy.settings()
    assert torch.equal(again.favourites, FAVOURITES)
    # Its class says what the card says.
    card = (folder / "README.md").read_text()
    assert "**Policy `favourites`.** The tokens that somebody likes best." in card and "- liked\n" in card
    assert "```python\nimport somebodys.policies  # registers the policy\nfrom hf_dynspec import Dyn" in card
    ids = prompt()
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assistant = DynSpecAssistant(perturbed(target), again, target=target)
    assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=assistant), plain)
    assert assistant.stats.drafted > 0


@pytest.mark.process
def test_an_assistant_saves_it_and_only_those_who_import_it_load_it(own, target, tmp_path):
    """In processes that have registered the class and in one that has not. The package lies in the current folder, so
    that whatever imported by name would find it."""
    drafter = perturbed(target)
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(tmp_path / name)
    policy = UnionShortlist(favourites(own, extra=60), HybridShortlist(core_size=16, window=16))
    DynSpecAssistant(drafter, policy, target=target).save_pretrained(tmp_path / "artifact")
    code = """
        import sys
        import torch
        from transformers import AutoModelForCausalLM
        from hf_dynspec import ArtifactError, DynSpecAssistant
        sys.path.insert(0, ".")
        if sys.argv[1] == "import":
            import somebodys.policies
        target, drafter = map(AutoModelForCausalLM.from_pretrained, ("target", "drafter"))
        try:
            assistant = DynSpecAssistant.from_pretrained("artifact", target=target, drafter=drafter)
            ids = torch.arange(3, 13).unsqueeze(0)
            drafted = target.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=assistant)
            assert torch.equal(drafted, target.generate(ids, max_new_tokens=8, do_sample=False))
            print(assistant.policy.policies[0].extra)
        except ArtifactError as error:
            print(f"{error.field}|{error}")
        print("somebodys" in sys.modules)
    """
    known = run_python(code, "import", cwd=own)
    assert known.stdout.splitlines() == ["60", "True"], known.stderr
    unknown = run_python(code, "nothing", cwd=own)
    refusal, was_imported = unknown.stdout.splitlines()
    assert refusal.startswith("config.json: policy.settings.policies[0].name|") and was_imported == "False"
    assert "there is no policy 'favourites'" in refusal and "Import the package that registers it" in refusal


HOSTILE = {
    "a tensor that it does not declare": ({"favourites": FAVOURITES, "ranking": FAVOURITES}, "ranking"),
    "a repeated id": ({"favourites": torch.tensor([3, 4, 3])}, "favourites"),
    "an id past the tokenizer": ({"favourites": torch.tensor([3, VOCABULARY])}, "favourites"),
    "more ids than there are": ({"favourites": torch.arange(VOCABULARY + 1)}, "favourites.shape"),
    "numbers of another kind": ({"favourites": torch.rand(4)}, "favourites.dtype"),
    "a nested tensor of its name": ({"0.favourites": FAVOURITES}, "0.favourites"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_its_declaration_is_what_files_are_held_against(own, tmp_path, name):
    tensors, field = HOSTILE[name]
    policy = favourites(own, favourites=FAVOURITES)
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=TOKENIZER)
    with pytest.raises(ArtifactError) as caught:
        write_artifact(tmp_path / "refused", config, tensors)
    assert caught.value.field == f"model.safetensors: {field}" and not (tmp_path / "refused").exists()
    folder = write_artifact(tmp_path / "artifact", config, policy.tensors())
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors")
    changed = json.loads((folder / "config.json").read_text())
    digest = digest_bytes((folder / "model.safetensors").read_bytes())
    changed["weights"] = {"sha256": digest.sha256, "size": digest.size}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ArtifactError) as caught:
        read_artifact(folder)
    assert caught.value.field == f"model.safetensors: {field}"


def test_what_is_not_declared_is_not_written(own, tmp_path):
    parse_policy("somebodys.policies:Undeclared")
    undeclared = register_policy(sys.modules["somebodys.policies"].Undeclared)(FAVOURITES)
    config = DynSpecConfig(PolicyConfig(undeclared.name, undeclared.settings()), tokenizer=TOKENIZER)
    with pytest.raises(ArtifactError, match="declare it in tensor_rules") as caught:
        write_artifact(tmp_path / "artifact", config, undeclared.tensors())
    assert caught.value.field == "model.safetensors: favourites"
    with pytest.raises(ArtifactError, match=r"policies\[1\]\.settings\.extra|extra must be"):
        parts = [{"name": "full", "settings": {}}, {"name": "undeclared", "settings": {"extra": -1}}]
        write_artifact(tmp_path / "artifact", DynSpecConfig(PolicyConfig("union", {"policies": parts})), {})


@pytest.mark.parametrize("wrong", [FullShortlist(), int, "full", type("Odd", (FullShortlist,), {"name": "Odd Name"})])
def test_only_named_classes_of_policies_are_registered(wrong):
    before = dict(POLICIES)
    with pytest.raises(ConfigurationError):
        register_policy(wrong)
    assert before == POLICIES


def test_a_stored_policy_of_the_package_declares_all_that_it_stores():
    for name in POLICIES:
        made = policy_class(name)
        assert made.card_summary and made.name == name
        assert "# registers" not in render_card(DynSpecConfig(PolicyConfig(name)))
    rules = policy_class("union").tensor_rules_for(
        {"policies": [{"name": "full", "settings": {}}, {"name": "hybrid", "settings": {}}]}
    )
    assert list(rules) == ["1.ranking"]
