"""Token clusters: what is clustered, equal groups, the report, and the command whose artifact is a policy."""

import sys
from pathlib import Path

import pytest
import torch
from calls import assert_same
from command_line import invoke
from models import EOS, VOCABULARY, perturbed, tiny, word_tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hf_dynspec import DynSpecAssistant
from hf_dynspec.artifacts import read_artifact, rebuild_policy, write_artifact
from hf_dynspec.build.clusters import cluster_tokens, kept_clusters, neighbour_spread
from hf_dynspec.errors import ArtifactError, ConfigurationError, DynSpecError
from hf_dynspec.protocol import VocabularyInfo
from hf_dynspec.shortlists import RouterShortlist

BOTH = pytest.mark.parametrize("balanced", [False, True], ids=["unbalanced", "balanced"])


def random_rows(count: int = 200, width: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def planted_rows(groups: int, per_group: int, width: int = 16, noise: float = 0.05, seed: int = 0):
    """Rows of a few directions in a random order, of lengths from 0.01 to 100, and the direction that each has."""
    generator = torch.Generator().manual_seed(seed)
    directions = functional.normalize(torch.randn(groups, width, generator=generator), dim=1)
    group = torch.arange(groups).repeat_interleave(per_group)
    group = group[torch.randperm(group.shape[0], generator=generator)]
    rows = directions[group] + noise * torch.randn(group.shape[0], width, generator=generator)
    return rows * 10 ** (4 * torch.rand(group.shape[0], 1, generator=generator) - 2), group


def require_partition(clusters: torch.Tensor, tokens: int) -> None:
    assert clusters.dtype == torch.int32
    assert clusters.shape == (tokens,)
    assert clusters.unique().tolist() == list(range(int(clusters.max()) + 1))


# Clusters ------------------------------------------------------------------------------------------------------------


@BOTH
def test_planted_clusters_are_recovered_whatever_the_lengths_of_rows(balanced):
    rows, group = planted_rows(groups=2, per_group=60)
    clusters = cluster_tokens(rows, 2, balanced=balanced).clusters.long()
    assert torch.equal(clusters, group) or torch.equal(clusters, 1 - group)
    # With more clusters than directions, no cluster has tokens of two.
    rows, group = planted_rows(groups=8, per_group=32)
    clusters = cluster_tokens(rows, 32, balanced=balanced).clusters
    assert all(group[clusters == cluster].unique().numel() == 1 for cluster in clusters.unique())


@BOTH
def test_only_directions_count_and_the_centroids_are_means_of_the_rows_as_they_are(balanced):
    rows = random_rows()
    scales = 2.0 ** torch.randint(-20, 20, (rows.shape[0], 1), generator=torch.Generator().manual_seed(1))
    made, scaled = (cluster_tokens(weight, 12, balanced=balanced) for weight in (rows, rows * scales))
    assert torch.equal(made.clusters, scaled.clusters)
    for weight, result in ((rows, made), (rows * scales, scaled)):
        means = torch.stack([weight[result.clusters == cluster].double().mean(0) for cluster in range(12)]).float()
        torch.testing.assert_close(result.centroids, means, rtol=1e-6, atol=0)
    assert made.centroids.dtype == torch.float32
    assert made.sizes.sum() == rows.shape[0]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_heads_of_other_dtypes_are_clustered_as_in_fp32(balanced, dtype):
    rows = random_rows().to(dtype)
    made, expected = (cluster_tokens(weight, 9, balanced=balanced) for weight in (rows, rows.float()))
    assert torch.equal(made.clusters, expected.clusters)
    torch.testing.assert_close(made.centroids, expected.centroids, rtol=1e-6, atol=1e-7)


@BOTH
def test_padding_rows_are_in_no_cluster_and_the_seed_decides(balanced):
    rows = random_rows(150)
    padded = torch.cat([rows, torch.full((30, rows.shape[1]), float("nan"))])
    made = cluster_tokens(padded, 14, vocabulary_size=150, balanced=balanced)
    require_partition(made.clusters, 150)
    assert made.centroids.shape == (14, rows.shape[1])
    again, other = (cluster_tokens(rows, 14, seed=seed, balanced=balanced).clusters for seed in (0, 1))
    assert torch.equal(made.clusters, again) and not torch.equal(made.clusters, other)


@BOTH
def test_no_cluster_is_empty(balanced):
    """Nearly as many clusters as tokens, where k-means is left with empty ones."""
    for seed in range(5):
        rows = random_rows(120, width=4, seed=seed)
        for num_clusters in (1, 100, 119, 120):
            made = cluster_tokens(rows, num_clusters, seed=seed, iterations=3, balanced=balanced)
            require_partition(made.clusters, 120)
            assert made.centroids.shape[0] == num_clusters


@pytest.mark.parametrize("iterations", [1, 25])
def test_identical_rows_leave_no_cluster_empty(iterations):
    """Tokens that were never trained can share one row: many first centroids are that row, and take nothing."""
    for seed in range(3):
        rows = random_rows(51, width=8, seed=seed)
        rows = torch.cat([rows, rows[:1].expand(150, 8)])
        made = cluster_tokens(rows, 40, seed=seed, iterations=iterations)
        require_partition(made.clusters, 201)
        assert made.centroids.shape[0] == 40
        assert made.clusters[51:].unique().tolist() == [int(made.clusters[0])]


def test_each_token_is_in_the_cluster_whose_mean_direction_is_nearest():
    """What spherical k-means comes to rest at, unlike k-means by distances."""
    # Some rows lie close together and others far apart, where distances to means and directions disagree.
    spread = torch.linspace(0.1, 3, 300).unsqueeze(1)
    rows = functional.normalize(torch.eye(6)[:3].repeat(100, 1) + spread * random_rows(300, width=6), dim=1)
    clusters = cluster_tokens(rows, 12, iterations=200).clusters.long()
    centroids = functional.normalize(torch.zeros(12, 6).index_add(0, clusters, rows), dim=1)
    assert torch.equal((rows @ centroids.T).argmax(dim=1), clusters)


def test_there_are_no_more_clusters_than_directions():
    rows = random_rows(5).repeat_interleave(10, dim=0) * 2.0 ** torch.arange(50).unsqueeze(1)
    made = cluster_tokens(rows, 12)
    require_partition(made.clusters, 50)
    assert torch.equal(made.clusters.view(5, 10), made.clusters.view(5, 10)[:, :1].expand(5, 10))
    assert made.centroids.shape[0] == made.clusters.unique().numel() == 5


@pytest.mark.parametrize(("tokens", "num_clusters"), [(256, 16), (257, 16), (100, 7), (50, 49), (50, 50), (9, 1)])
def test_balanced_sizes_differ_by_at_most_one(tokens, num_clusters):
    made = cluster_tokens(random_rows(tokens), num_clusters, balanced=True)
    require_partition(made.clusters, tokens)
    assert made.sizes.shape[0] == num_clusters
    assert made.sizes.max() - made.sizes.min() <= 1


def test_clusters_are_kept_for_the_same_settings_alone(tmp_path):
    rows, file = random_rows(), tmp_path / "clusters.safetensors"
    told: list[str] = []

    def made(count: int, seed: int) -> torch.Tensor:
        told.clear()
        return kept_clusters(file, rows, count, 190, seed, lambda activity, done, total: told.append(activity))

    first = made(7, 1)
    assert torch.equal(first, cluster_tokens(rows, 7, vocabulary_size=190, seed=1).clusters.long())
    assert told and torch.equal(made(7, 1), first) and not told
    for count, seed in ((8, 1), (7, 2)):
        expected = cluster_tokens(rows, count, vocabulary_size=190, seed=seed).clusters.long()
        assert torch.equal(made(count, seed), expected) and told
    assert list(tmp_path.iterdir()) == [file]


@BOTH
def test_rows_of_zeros_are_in_some_cluster_and_disturb_nobody(balanced):
    rows = random_rows(100)
    rows[[3, 50, 99]] = 0
    made = cluster_tokens(rows, 10, balanced=balanced)
    require_partition(made.clusters, 100)
    if not balanced:
        others = rows.any(dim=1)
        assert torch.equal(made.clusters[others].long(), cluster_tokens(rows[others], 10).clusters.long())


@BOTH
def test_progress_is_reported(balanced):
    reports = []
    cluster_tokens(random_rows(), 8, iterations=6, balanced=balanced, report=lambda *report: reports.append(report))
    done = [done for _, done, _ in reports]
    assert len(done) > 5 and done == sorted(done) and done[-1] == reports[-1][2]


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused(balanced, value):
    rows = random_rows(20_000, width=4)
    rows[12_345, 2] = value
    with pytest.raises(ConfigurationError, match="row 12345 of the head holds NaN or infinity"):
        cluster_tokens(rows, 4, balanced=balanced)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be a whole number from 1 to 200"),
        ({"num_clusters": 201}, "from 1 to 200, the number of tokens; got 201"),
        ({"num_clusters": 151, "vocabulary_size": 150}, "from 1 to 150"),
        ({"seed": 2**31}, "seed must be"),
        ({"iterations": 0}, "iterations must be"),
        ({"vocabulary_size": 201}, "the tokenizer has 201 ids, and the head scores 200"),
        ({"weight": torch.zeros(200, 4)}, "5 clusters need as many rows other than zero, and there are 0"),
        ({"weight": torch.zeros(200, 4, dtype=torch.int64)}, "weight must be floating-point"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        cluster_tokens(**{"weight": random_rows(), "num_clusters": 5, **change})


def test_the_error_without_faiss_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DynSpecError, match=r"pip install 'hf-dynspec\[build\]'"):
        cluster_tokens(random_rows(), 5)
    assert cluster_tokens(random_rows(), 5, balanced=True).centroids.shape[0] == 5


# The report ----------------------------------------------------------------------------------------------------------


def test_neighbours_are_those_of_an_exact_search(monkeypatch):
    # Small pieces, so that the search merges many.
    monkeypatch.setattr("hf_dynspec.build.clusters._CHUNK_QUERIES", 37)
    rows = torch.cat([random_rows(), torch.full((10, 16), float("nan"))])
    clusters = cluster_tokens(rows, 15, vocabulary_size=200).clusters
    cosines = functional.normalize(rows[:200], dim=1) @ functional.normalize(rows[:200], dim=1).T
    nearest = cosines.fill_diagonal_(-2).argsort(dim=1, descending=True)
    spread = neighbour_spread(rows, clusters, neighbours=(50, 1, 10, 200), samples=500)
    assert list(spread) == [1, 10, 50]
    for count, (found, _) in spread.items():
        exact = sum(clusters[ids[:count]].unique().numel() for ids in nearest) / 200
        assert found == pytest.approx(exact)


def test_neighbours_lie_in_fewer_clusters_than_by_chance():
    rows, _ = planted_rows(groups=10, per_group=30)
    found, at_random = neighbour_spread(rows, cluster_tokens(rows, 10, balanced=True).clusters)[10]
    # Ten tokens over ten clusters of the same size: 10 · (1 − 0.9¹⁰) = 6.5 of them.
    assert found < 2.5 and at_random == pytest.approx(6.5, abs=0.3)
    rows[1:] = 0
    assert neighbour_spread(rows, torch.zeros(300, dtype=torch.int32), neighbours=[600]) == {}
    assert neighbour_spread(torch.zeros(500, 16), torch.zeros(500, dtype=torch.int32)) == {}


# The command ---------------------------------------------------------------------------------------------------------


def save_model(folder: Path, family: str = "llama", tokens: int = VOCABULARY, **changes) -> Path:
    tiny(family, **changes).save_pretrained(folder)
    word_tokenizer(tokens).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A model whose head has more rows than the tokenizer has ids."""
    return save_model(tmp_path_factory.mktemp("models") / "target", vocabulary=VOCABULARY + 19)


def build(target: Path, out: Path, num_clusters: int = 20, *more: object, problem: str | None = None) -> str:
    """The output of the command, or of what it is refused for."""
    words = ["--target", target, "--num-clusters", num_clusters, "--out", out, *more]
    result = invoke("build", "clusters", *words)
    if problem is not None:
        assert isinstance(result.exception, ConfigurationError) and problem in str(result.exception)
    else:
        assert result.exit_code == 0, result.output
    return result.output


def test_the_command_makes_a_policy(target, tmp_path):
    out = tmp_path / "made" / "here"
    output = build(target, out, 20, "--seed", 7)
    assert f"{VOCABULARY} tokens in 20 clusters" in output and "--policy router:router=" in output
    assert "the 10 nearest" in output and "at random)" in output
    config, tensors = read_artifact(out)
    require_partition(tensors["clusters"], VOCABULARY)
    weight = AutoModelForCausalLM.from_pretrained(target).lm_head.weight
    expected = cluster_tokens(weight, 20, vocabulary_size=VOCABULARY, seed=7)
    assert torch.equal(tensors["clusters"], expected.clusters)
    assert torch.equal(tensors["centroids"], expected.centroids)
    assert config.tokenizer.eos_token_ids == (EOS,)
    assert config.provenance["head"]["rows"] == VOCABULARY + 19
    metrics = config.provenance["partition"]
    assert metrics["smallest_cluster"] == int(expected.sizes.min())
    assert metrics["largest_share"] == pytest.approx(int(expected.sizes.max()) / VOCABULARY)
    assert metrics["clusters_of_nearest"]["10"]["found"] < metrics["clusters_of_nearest"]["10"]["random_partition"]
    # Nothing says how the disk is laid out.
    assert str(tmp_path.parent) not in config.to_json()
    assert config.provenance["command"].startswith("hf-dynspec build clusters --target target --num-clusters 20")
    # Clusters fit the drafter of whose head they are, and no network chooses them.
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Where no network was trained" in card and "- Drafter: not named" in card
    rebuilt, named = rebuild_policy(config, tensors), RouterShortlist(out)
    assert rebuilt.settings() == named.settings()
    assert rebuilt.router.num_clusters == named.router.num_clusters == 20


def test_centroids_choose_the_clusters_that_hold_the_most_probable_token(target, tmp_path):
    """Against as many clusters drawn at random."""
    build(target, tmp_path)
    policy = RouterShortlist(tmp_path, max_clusters=4)
    state = policy.start(VocabularyInfo(VOCABULARY, (EOS,), torch.device("cpu")))
    weight = AutoModelForCausalLM.from_pretrained(target).lm_head.weight[:VOCABULARY].detach()
    generator = torch.Generator().manual_seed(0)
    hits = at_random = 0
    for _ in range(400):
        features = torch.randn(1, weight.shape[1], generator=generator)
        best = int((features @ weight.T).argmax())
        hits += best in state.select(0, torch.tensor([5]), features).ids().tolist()
        drawn = torch.randperm(20, generator=generator)[:4]
        at_random += int(policy.router.clusters[best]) in drawn.tolist()
    assert hits > 2 * at_random


def test_the_artifact_drafts_without_changing_what_is_generated(target, tmp_path):
    build(target, tmp_path, 16, "--balanced")
    config, tensors = read_artifact(tmp_path)
    assert set(torch.bincount(tensors["clusters"]).tolist()) == {VOCABULARY // 16, VOCABULARY // 16 + 1}
    assert config.provenance["balanced"] is True
    model = tiny(vocabulary=VOCABULARY)
    policy = RouterShortlist(tmp_path, max_clusters=6)
    assert_same(model, DynSpecAssistant(perturbed(model), policy, target=model))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_tied_heads_are_read_under_every_name(family, tmp_path):
    """Of one of these the files are read, and the other is loaded by transformers."""
    folder = save_model(tmp_path / family, family)
    build(folder, tmp_path / "out")
    weight = tiny(family).get_output_embeddings().weight
    assert torch.equal(read_artifact(tmp_path / "out")[1]["clusters"], cluster_tokens(weight, 20).clusters)


def test_fewer_clusters_than_asked_for_are_told(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[:10].repeat(31, 1)[:VOCABULARY])
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    assert "10 clusters instead of 20" in build(tmp_path / "model", tmp_path / "out")
    assert read_artifact(tmp_path / "out")[1]["centroids"].shape[0] == 10


def test_an_artifact_is_replaced_only_on_demand(target, tmp_path):
    build(target, tmp_path)
    build(target, tmp_path, 10, problem="already holds an artifact")
    build(target, tmp_path, 10, "--overwrite")
    assert read_artifact(tmp_path)[1]["centroids"].shape[0] == 10
    build(target, target, 10, "--overwrite", problem="")


def test_what_cannot_be_clustered_is_refused_before_weights_are_read(target, tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "no-weights")
    word_tokenizer(VOCABULARY + 40).save_pretrained(tmp_path / "larger")
    out, words = tmp_path / "out", ("--tokenizer", tmp_path / "larger")
    build(tmp_path / "no-weights", out, VOCABULARY + 1, problem=f"from 1 to {VOCABULARY}, the number of tokens")
    build(tmp_path / "no-weights", out, 5, problem="cannot be loaded")
    told = f"the tokenizer has {VOCABULARY + 40} ids, and the head scores {VOCABULARY + 19}"
    build(target, out, 5, *words, problem=told)
    words = ["--target", tmp_path / "no-weights", "--num-clusters", 0, "--out", out]
    assert invoke("build", "clusters", *words).exit_code == 2 and not out.exists()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"clusters": torch.arange(10, dtype=torch.int32)}, "gives 10 tokens a cluster"),
        ({"clusters": torch.full((VOCABULARY,), -1, dtype=torch.int32)}, "holds the cluster -1"),
        ({"clusters": torch.full((VOCABULARY,), 2**30, dtype=torch.int32)}, "holds the cluster 1073741824"),
        ({"clusters": torch.arange(VOCABULARY, dtype=torch.int32) % 4 * 2}, "leaves the cluster 1 of 7 without"),
        ({"clusters": torch.zeros(VOCABULARY)}, "dtype"),
        ({"centroids": torch.zeros(4, 8, dtype=torch.float64)}, "dtype"),
        ({"centroids": torch.zeros(4)}, "not 2 dimensions"),
        ({"centroids": torch.full((4, 8), float("nan"))}, "NaN"),
    ],
)
def test_damaged_clusters_are_not_written(target, tmp_path, tensors, message):
    build(target, tmp_path / "good", 4)
    config, good = read_artifact(tmp_path / "good")
    with pytest.raises(ArtifactError, match=message):
        write_artifact(tmp_path / "bad", config, {**good, **tensors})
    assert not (tmp_path / "bad").exists()
