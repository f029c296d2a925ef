"""README, docs and model cards: their Python runs on the embedded pocket pair, their commands are real and those of
README and docs run, links lead somewhere, and figures in two places are equal."""

import json
import lzma
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import typer
from accelerate.commands.launch import launch_command_parser
from cases import representatives
from eagle_heads import random_head
from models import random_router
from mtp_models import write_layer_for
from pocket import DRAFTER_WIDTH, POCKET, TARGET_SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_dynspec import DynSpecAssistant
from hf_dynspec.artifacts import push_artifact, write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.assistant import saved
from hf_dynspec.build.exports.custom_generate import write_custom_generate
from hf_dynspec.build.exports.static import read_static_shortlist
from hf_dynspec.commands import app
from hf_dynspec.evaluation.bench.systems import HEAD_PRODUCT, PLAIN, PROMPT_LOOKUP, TRANSFORMERS, TRANSFORMERS_DEFAULTS
from hf_dynspec.shortlists import FrequencyShortlist, RouterShortlist, ShortlistPolicy
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
PAGES = [README, *DOCS, *CARDS]
# tests/examples/test_write_a_policy.py runs the first; the other is for computers with a GPU.
NOT_RUN_HERE = {"write-a-policy.md", "on-a-gpu.md"}
# Names on the Hub, and where they are read from instead. Models keep these names, as if they came from the Hub.
LOCAL = {
    "Qwen/Qwen3-8B": POCKET / "target",
    "Qwen/Qwen3-0.6B": POCKET / "drafter",
    "path/to/target": POCKET / "target",
    "path/to/drafter": POCKET / "drafter",
    "me/qwen3-8b-dynspec": Path("pushed"),
    "hf-dynspec/qwen2.5-vocabulary-drafter-router": Path("router"),
    "hf-dynspec/qwen2.5-vocabulary-eagle3-router": Path("router-of-the-head"),
}
# What is downloaded by such a name later: the pocket target has no layers for multi-token prediction.
DOWNLOADED = LOCAL | {"Qwen/Qwen3-8B": Path("with-mtp-layers")}
NEW_TOKENS = 128
DOMAINS = ("code", "law", "med", "books", "math", "german")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of a page and the number of the line before each."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# Python --------------------------------------------------------------------------------------------------------------


def run(page: Path, block: tuple[int, str], namespace: dict[str, Any]) -> None:
    """Run a block; a traceback shows the page's line."""
    line, source = block
    exec(compile("\n" * line + source, page, "exec"), namespace)


def write_policy(folder: str, policy: ShortlistPolicy) -> None:
    tokenizer = fingerprint_tokenizer(AutoTokenizer.from_pretrained(POCKET / "target"))
    write_artifact(
        Path(folder),
        DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=tokenizer),
        policy.tensors(),
    )


@pytest.fixture(scope="module")
def hub_on_disk(tmp_path_factory) -> Iterator[None]:
    """A working folder with what the pages call `path/to/…`, in which the Hub is what `LOCAL` says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pages"))
        for loader in (AutoModelForCausalLM, AutoTokenizer, DynSpecAssistant):

            def load(name: Any, *, original: Any = loader.from_pretrained, **options: Any) -> Any:
                loaded = original(LOCAL.get(name, name), **options)
                if hasattr(loaded, "name_or_path"):
                    loaded.name_or_path = name
                return loaded

            patch.setattr(loader, "from_pretrained", load)
        patch.setattr("hf_dynspec.artifacts.hub.snapshot_download", lambda name, **_: str(DOWNLOADED[name]))

        def push(directory: str, repo_id: str, **_: Any) -> None:
            shutil.copytree(directory, LOCAL[repo_id])

        patch.setattr(saved, "push_artifact", create_autospec(push_artifact, side_effect=push))
        size = len(AutoTokenizer.from_pretrained(POCKET / "target"))
        for folder in ("path/to/ranking", "ranking"):
            write_policy(folder, FrequencyShortlist(torch.arange(size)))
        for folder, width in (("router", DRAFTER_WIDTH), ("router-of-the-head", TARGET_SHAPE["hidden_size"])):
            write_policy(folder, RouterShortlist(random_router(64, width, vocabulary=size)))
        random_head("eagle3", size, draft_vocabulary=8192, **TARGET_SHAPE).write(Path("path/to/eagle-head"))
        shortlist = read_static_shortlist("path/to/ranking", engine="transformers", size=8192)
        write_custom_generate(Path("path/to/shortlist"), shortlist)
        write_layer_for(AutoModelForCausalLM.from_pretrained("path/to/target"), DOWNLOADED["Qwen/Qwen3-8B"])
        yield


@pytest.fixture(scope="module")
def shared(hub_on_disk) -> dict[str, Any]:
    """The names that the README's first block defines. Every other block goes on from them."""
    namespace: dict[str, Any] = {}
    run(README, blocks(README, "python")[0], namespace)
    return namespace


def test_the_readmes_first_block_writes_what_plain_generate_writes(shared):
    plain = shared["target"].generate(**shared["inputs"], max_new_tokens=NEW_TOKENS)
    assert shared["output"].tolist() == plain.tolist()
    assert shared["assistant"].stats.accepted > 0


RUN_HERE = [page for page in (README, *DOCS) if page.name not in NOT_RUN_HERE and blocks(page, "python")]


@pytest.mark.parametrize("page", representatives("process", RUN_HERE), ids=name_of)
def test_every_python_block_goes_on_from_the_readmes_first(page, shared, capsys):
    found = blocks(page, "python")[page == README :]
    assert found
    saved.push_artifact.reset_mock()
    for block in found:
        own = dict(shared)
        run(page, block, own)
        if "output =" in block[1]:
            assert own["output"].tolist() == shared["output"].tolist()
        if "draft_round" in block[1]:
            assert own["candidates"].token_ids.shape == own["candidates"].parents.shape
        if "from_pretrained(" in block[1] and "DynSpecAssistant" in block[1]:
            assert own["assistant"] is not shared["assistant"] and own["assistant"].target is shared["target"]
        if "profile=True" in block[1]:
            printed = capsys.readouterr().out
            share = re.search(r"head: (\d+)% of a draft step; a shortlist has up to (\d+\.\d+) times", printed)
            assert 0 < int(share[1]) < 100 and float(share[2]) >= 1
    assert saved.push_artifact.call_count == sum("push_to_hub(" in source for _, source in found)


@pytest.mark.process
@pytest.mark.parametrize("page", [page for page in CARDS if blocks(page, "python")], ids=name_of)
def test_the_python_of_a_card_stands_for_itself(page, hub_on_disk):
    namespace: dict[str, Any] = {}
    for block in blocks(page, "python"):
        run(page, block, namespace)
    assert namespace["assistant"].stats.tokens > 0


# Commands ------------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """The words of each line of a page's shell blocks."""
    lines = [line for _, block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def parse(words: list[str]) -> None:
    """Parse and convert the arguments of `hf-dynspec`, and call nothing."""
    command, rest = typer.main.get_command(app), words
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("hf-dynspec", list(rest))


def require_real(words: list[str]) -> None:
    """The project or its dependencies have this command, with these options."""
    match words:
        case ["hf-dynspec", *rest]:
            parse(rest)
        case ["accelerate", "launch", *rest]:
            launched = launch_command_parser().parse_args(rest)
            assert launched.module and launched.training_script == "hf_dynspec.commands"
            parse(launched.training_script_args)
        case ["python", script, *options]:
            source = (ROOT / script).read_text(encoding="utf-8")
            for word in options:
                # In the source literally, or made by typer from a parameter's name.
                spellings = rf'"{word}"|\b{word[2:].replace("-", "_")}: '
                assert not word.startswith("--") or re.search(spellings, source), word
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
            assert all(f"$({name})" in makefile for name in (word.partition("=")[0] for word in variables))
        case ["pip", "install", name]:
            assert f"\nname = {name}\n" in (ROOT / "setup.cfg").read_text(encoding="utf-8")
        case _:
            pytest.fail(f"nothing here knows whether this is a command: {shlex.join(words)}")


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_every_command_takes_what_it_is_given(page):
    for words in commands(page):
        require_real(words)


def test_a_wrong_command_is_found_and_every_command_of_the_package_is_in_the_docs():
    wrong = ("hf-dynspec bench --targets a", "python examples/quickstart.py --fast", "hf_dynspec bench")
    for line in (*wrong, "make quickstart TARGETS=a"):
        with pytest.raises((Exception, pytest.fail.Exception)):
            require_real(shlex.split(line))
    named = {words[1] for page in PAGES for words in commands(page) if words[0] == "hf-dynspec"}
    assert named == set(typer.main.get_command(app).commands)


# Arguments that make the commands of README and docs small, in the order in which they need one another's results.
_FEW_TOKENS = ("--limit", "1", "--max-new-tokens", "6", "--threads", "1")
_BENCH = (*_FEW_TOKENS, "--repeats", "1", "--profile-prompts", "1", "--skip-coverage")
_TRAINING = ("--steps", "400", "--held-out", "64", "--max-batches", "8", "--batch-size", "64")
_FEW_BATCHES = ("--steps", "2", "--window", "48", "--batch-tokens", "64", "--threads", "1")
_SMALLER = {
    ("build", "frequency"): ("--max-new-tokens", "4", "--overwrite"),
    ("export", "sglang"): (),
    ("build", "frequency-import"): ("--overwrite",),
    ("build", "graph"): ("--minimum-count", "2", "--overwrite"),
    ("build", "clusters"): ("--num-clusters", "48", "--iterations", "4"),
    ("train", "router"): (*_TRAINING, "--num-clusters", "48", "--window", "48", "--threads", "1"),
    ("train", "eagle"): _FEW_BATCHES,
    ("train", "drafter"): _FEW_BATCHES,
    ("convert", "eagle"): ("--overwrite",),
    ("export", "vllm"): ("--size", "2048"),
    ("export", "custom-generate"): (),
    ("coverage",): _FEW_TOKENS,
    ("doctor",): ("--limit", "1", "--max-new-tokens", "24", "--threads", "1", "--policy", "hybrid", "--seconds", "20"),
    ("bench",): _BENCH,
    ("evaluate",): (*_FEW_TOKENS, "--profile-prompts", "1", "--no-rivals", "--no-transformers-assisted"),
    ("plot",): (),
    ("trace",): ("--max-new-tokens", "24", "--threads", "1"),
    ("push",): ("--dry-run",),
}


def in_order() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """The commands of README and docs, and what is added to each."""
    pages = [page for page in (README, *DOCS) if page.name not in NOT_RUN_HERE]
    found = [words[1:] for page in pages for words in commands(page) if words[0] == "hf-dynspec"]
    without = [words for words in found if not any(tuple(words[: len(start)]) == start for start in _SMALLER)]
    assert not without, f"nothing here makes these small: {without}"
    for start, added in _SMALLER.items():
        some = [words for words in found if tuple(words[: len(start)]) == start]
        assert some, f"no page shows hf-dynspec {' '.join(start)}"
        yield from ((words, added) for words in some)


def expanded(words: list[str]) -> list[str]:
    """The words as a shell would pass them, with local names in place of those on the Hub."""
    names = {"Qwen/Qwen3-8B": "path/to/target", "Qwen/Qwen3-0.6B": "path/to/drafter"}
    files = [sorted(map(str, Path().glob(word))) if "*" in word else [names.get(word, word)] for word in words]
    assert all(files), f"no file fits one of {words}"
    return [word for some in files for word in some]


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with the inputs of the commands: the pocket pair, a head for it, texts and prompts."""
    monkeypatch.chdir(tmp_path)
    Path("path/to").mkdir(parents=True)
    for name in ("target", "drafter"):
        Path("path/to", name).symlink_to(POCKET / name)
    size = len(AutoTokenizer.from_pretrained(POCKET / "target"))
    random_head("eagle3", size, **TARGET_SHAPE).write(Path("path/to/eagle-head"))
    texts = [
        json.dumps({"text": file.read_text(encoding="utf-8")}) for file in sorted(ROOT.glob("tests/**/test_*s.py"))
    ]
    for folder in ("corpus", "train"):
        Path(folder).mkdir()
    for number, text in enumerate(texts):
        Path(f"corpus/{number}.jsonl").write_text(text + "\n", encoding="utf-8")
        Path(f"train/{number}.jsonl.xz").write_bytes(lzma.compress(text.encode("utf-8")))
    for name in (*DOMAINS, "prompts", "question"):
        shutil.copy(POCKET / "prompts.jsonl", f"{name}.jsonl")
    for folder in ("model_cards", "docs"):
        Path(folder).mkdir()
    shutil.copy(ROOT / "model_cards/measured-pair.json", "model_cards")
    return tmp_path


@pytest.mark.process
def test_the_commands_of_readme_and_docs_run_one_after_the_other(workplace):
    ran = []
    for words, added in in_order():
        result = CliRunner().invoke(app, [*expanded(words), *added])
        assert result.exit_code == 0, f"hf-dynspec {shlex.join(words)}: {result.exception} {result.output}"
        ran.append(words)
        if "--results" in words:
            assert "\n| this artifact | " in result.output
    assert len(ran) >= 15
    written = """results.json results.svg coverage.json coverage.png bench.json doctor.json docs/speed.svg trace.html
        timeline.json evaluation/tables.md evaluation/speed-by-domain.svg microspec-2/tables.md"""
    for name in written.split():
        assert Path(name).stat().st_size > 0
    policy = RouterShortlist("router/")
    assert policy.router.num_clusters == 48


# Links, names and lengths --------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_whatever_a_page_names_exists(page):
    """Links with their anchors, files and tests."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", link):
            assert linked.is_relative_to(ROOT) and linked.exists(), link
            assert not anchor or anchor in anchors(linked), link
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|examples|docs|model_cards|hf_dynspec)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    tests = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_readme_is_one_page_and_leads_to_every_other():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(README)}
    assert linked >= set(DOCS) | set(CARDS)


# Figures -------------------------------------------------------------------------------------------------------------


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the table with these words in its first line, by their first cell."""
    lines = page.read_text(encoding="utf-8").splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith("|") and heading in line)
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip(" *`") for cell in line.strip("|").split("|"))
        found[first] = cells
    return found


# What the systems of the measured pair are called in tables.
_NAMES = {
    PLAIN: {"plain generate"},
    HEAD_PRODUCT: {HEAD_PRODUCT},
    TRANSFORMERS: {"transformers' assisted, chains of 5", "transformers' assisted"},
    TRANSFORMERS_DEFAULTS: {"transformers' defaults"},
    PROMPT_LOOKUP: {"transformers' prompt lookup"},
    "full": {"full"},
    "frequency": {"frequency, 32,768 in merge order", "frequency`, 32,768"},
    "in_context": {"in_context"},
    "hybrid": {"hybrid"},
    "screen": {"screen"},
    "retrieval:core=rank/without-none,graph=graph/without-none": {"retrieval, a whole core of 32,768 and a graph"},
    "auto": {"auto, of hybrid and screen"},
}


def measured(temperature: float) -> dict[str, dict[str, Any]]:
    data = json.loads((ROOT / "model_cards/measured-pair.json").read_text(encoding="utf-8"))
    found = {row["system"]: row for row in data["results"] if row["temperature"] == temperature}
    assert set(found) == set(_NAMES)
    return found


def ratio(row: dict[str, Any], base: str) -> str:
    return f"{row['ratios'][base]['median']:.2f}×" if base in row["ratios"] else ""


@pytest.mark.parametrize(("temperature", "heading"), [(0.0, "| greedy |"), (0.8, "| temperature 0.8, top-k 50 |")])
def test_the_measured_pairs_table_shows_the_data_of_the_picture(temperature, heading):
    table = rows(ROOT / "model_cards/measured-pair.md", heading)
    for system, row in measured(temperature).items():
        (name,) = _NAMES[system] & set(table)
        speed, plain, product, assisted, frequency, length, *_ = table[name]
        assert (speed, length) == (f"{row['tokens_per_second']['median']:.1f}", f"{row['acceptance_length']:.2f}")
        bases = (PLAIN, HEAD_PRODUCT, TRANSFORMERS, "frequency")
        shown = ["" if base == system else ratio(row, base) for base in bases]
        assert [plain, product, assisted, frequency] == shown


def test_the_readmes_table_has_the_figures_of_the_measured_pair():
    for name, cells in rows(README, "| faster by |").items():
        shown = []
        for found in (measured(0.0), measured(0.8)):
            (row,) = (found[system] for system, names in _NAMES.items() if name in names)
            faster = "" if row["system"] == PLAIN else f"{ratio(row, PLAIN)} / {ratio(row, HEAD_PRODUCT)}"
            shown += [f"{row['tokens_per_second']['median']:.1f}", faster, f"{row['acceptance_length']:.2f}"]
        assert cells[:5] == shown[:5]
    hybrid = measured(0.0)["hybrid"]
    for base in (PLAIN, HEAD_PRODUCT):
        assert f"{ratio(hybrid, base)[:-1]} times as fast" in " ".join(prose(README).split())


def test_the_readmes_table_has_the_figures_of_gemma():
    card = {
        re.split("[`,]", name)[0]: (cells[1], cells[6])
        for name, cells in rows(ROOT / "model_cards/gemma-3-270m.md", "| draft ms of a round |").items()
        if "counted" not in name
    }
    shown = {
        re.split("[`,]", name)[0]: tuple(cells[5].split(", ")) for name, cells in rows(README, "| faster by |").items()
    }
    assert len(card) > 6 and all(card[name] == ratios for name, ratios in shown.items() if ratios != ("",))
    assert f"becomes {' and '.join(one[:-1] for one in card['hybrid'])} times as fast" in prose(README)


def test_the_readmes_picture_is_what_the_command_draws(tmp_path):
    """Its texts, as places differ with the version of matplotlib."""
    result = CliRunner().invoke(app, ["plot", str(ROOT / "model_cards/measured-pair.json"), str(tmp_path / "a.svg")])
    assert result.exit_code == 0, result.exception
    drawn, shipped = (
        re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text(encoding="utf-8"))
        for file in (tmp_path / "a.svg", ROOT / "docs/speed.svg")
    )
    hybrid = measured(0.0)["hybrid"]
    assert shipped == drawn and f"{hybrid['tokens_per_second']['median']:.0f}  ({ratio(hybrid, PLAIN)})" in drawn
