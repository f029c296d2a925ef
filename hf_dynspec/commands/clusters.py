"""`hf-dynspec build clusters`: the vocabulary in groups of tokens whose rows of the LM head point the same way."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import counted
from . import options
from .building import command_text, require_free_folder, shorten_name, write_policy
from .common import progress_bar, wide_console

if TYPE_CHECKING:
    import torch

    from ..build.clusters import TokenClusters


def clusters(
    *,
    context: typer.Context,
    target: Annotated[
        str,
        typer.Option(
            help="Folder or Hub id of the model whose LM head is clustered. EAGLE heads that score with the target's "
            "head need the target's; for an independent drafter, name the drafter. Of a folder with safetensors "
            "only the head is read."
        ),
    ],
    num_clusters: Annotated[int, typer.Option(min=1, metavar="M", help="How many clusters to make.")],
    out: options.Out,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the tokenizer. Default: the one beside the model.")
    ] = None,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="Make groups of equal size, for comparison (CORAL has such groups).")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of k-means; balanced, for each split.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="For the first centroids, and the sample of the report.")] = 0,
    overwrite: options.Overwrite = False,
) -> None:
    """Divide the tokens into clusters by spherical k-means over the rows of an LM head (DynaSpec).

    The artifact is a `router` policy that chooses clusters by their centroids, with nothing trained. A router can be
    trained on the same clusters. Each token of the tokenizer is in exactly one cluster; padding rows of the head are
    in none.
    """
    require_free_folder(context, out, overwrite)
    from ..build.clusters import cluster_tokens, neighbour_spread, require_cluster_settings, require_faiss
    from ..loading import find_eos_token_ids, load_tokenizer
    from ..shortlists.router import Router, RouterShortlist
    from ..vocabulary import fingerprint_tokenizer

    if not balanced:
        require_faiss()
    loaded = load_tokenizer(tokenizer or target)
    fingerprint = fingerprint_tokenizer(loaded, find_eos_token_ids(target, loaded))
    require_cluster_settings(num_clusters, seed, iterations, fingerprint.size)
    weight = _read_head(target)
    rows, width = weight.shape
    typer.echo(
        f"{rows:,} rows of {width:,}, {fingerprint.size:,} of them tokens: {4 * fingerprint.size * width / 2**30:.2f} "
        "GiB for them in fp32",
        err=True,
    )
    settings = {"seed": seed, "iterations": iterations, "balanced": balanced}
    with progress_bar() as report:
        made = cluster_tokens(weight, num_clusters, vocabulary_size=fingerprint.size, **settings, report=report)
        spread = neighbour_spread(weight, made.clusters, seed=seed, report=report)
    provenance = {
        "command": command_text(context),
        "head": {"model": shorten_name(target), "rows": rows, "width": width, "dtype": str(weight.dtype)[6:]},
        **settings,
        "partition": _describe(made, spread),
    }
    policy = RouterShortlist(Router(made.clusters, centroids=made.centroids))
    # Provenance alone names the model: the head may be the target's or the drafter's own.
    write_policy(out, policy.name, policy.settings(), policy.tensors(), fingerprint, provenance)
    _print_report(provenance["partition"])
    count = made.centroids.shape[0]
    if count < num_clusters:
        typer.echo(
            f"{counted(count, 'cluster')} instead of {num_clusters}: too few rows differ in direction", err=True
        )
    typer.echo(f"{out}: {fingerprint.size:,} tokens in {counted(count, 'cluster')}")
    typer.echo(
        f"use them by --policy router:router={out}, whose first draft step selects {policy.budget(0):,} of them "
        f"(max_clusters says how many), or by train router --clusters {out}"
    )


def _read_head(name: str) -> "torch.Tensor":
    """`[V, d]`: the weight of a model's output projection."""
    from ..drafters.eagle.conversion import read_output_rows
    from ..errors import ArtifactError
    from ..loading import load_model
    from ..modeling.head import DynamicLMHead

    if os.path.isdir(name):
        try:
            return read_output_rows(name)[0]
        except ArtifactError:
            pass  # Other names of tensors, or pickles: transformers knows them, and says what is wrong otherwise.
    return DynamicLMHead.from_model(load_model(name, device="cpu")).weight


def _describe(made: "TokenClusters", spread: dict[int, tuple[float, float]]) -> dict[str, Any]:
    sizes = made.sizes
    return {
        "clusters": sizes.shape[0],
        "smallest_cluster": int(sizes.min()),
        "median_cluster": float(sizes.double().quantile(0.5)),
        "largest_cluster": int(sizes.max()),
        "largest_share": int(sizes.max()) / int(sizes.sum()),
        "clusters_of_nearest": {
            str(count): {"found": round(found, 3), "random_partition": round(at_random, 3)}
            for count, (found, at_random) in spread.items()
        },
    }


def _print_report(metrics: dict[str, Any]) -> None:
    from ..evaluation.tables import FittedTable

    nearest = metrics["clusters_of_nearest"]
    table = FittedTable(
        "Sizes of the clusters, and in how many of them a token's nearest neighbours lie",
        ["clusters", "smallest", "median", "largest", *(f"the {count} nearest\nlie in" for count in nearest)],
        caption="a good partition keeps neighbours together: in fewer clusters than one of the same sizes at random",
    )
    table.add_row(
        f"{metrics['clusters']:,}",
        f"{metrics['smallest_cluster']:,}",
        f"{metrics['median_cluster']:,g}",
        f"{metrics['largest_cluster']:,} ({metrics['largest_share']:.1%})",
        *(f"{means['found']:.1f}\n({means['random_partition']:.1f} at random)" for means in nearest.values()),
    )
    wide_console().print(table)
