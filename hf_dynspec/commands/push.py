"""`hf-dynspec push`: publish an artifact on the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..build.exports import FILES
from ..errors import ConfigurationError, counted
from .running import keeps


def push(
    *,
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the artifact.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="name or organisation/name; made if needed.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Repeatable. JSON of hf-dynspec bench or coverage, to be kept with the artifact."
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="HUB_ID", help="Repeatable. A dataset that it was made from.")
    ] = None,
    license: Annotated[  # the name of the option
        str | None, typer.Option(metavar="ID", help="As the Hub writes it, such as apache-2.0.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="For a repository that is made. Default: your account's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to, made if needed. Default: main.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request, leaving the branch.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="Default: a plain sentence.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card; change and upload nothing.")
    ] = False,
) -> None:
    """Publish an artifact in one commit, with a model card, and print the commit's or pull request's address.

    The artifact is checked as on loading. --results, --dataset and --license are noted in its folder first. A model
    card that somebody edited is kept.
    """
    _require_artifact(directory, repo_id)
    from huggingface_hub.errors import HfHubHTTPError

    from ..artifacts import annotate_artifact, push_artifact, read_artifact, rebuild
    from ..artifacts.card import card_to_publish
    from ..artifacts.publishing import published_sizes
    from ..artifacts.writing import with_annotations
    from ..evaluation.bench.published_rows import read_published_rows

    config, tensors = read_artifact(directory)
    policy = rebuild(config, tensors)
    rows = [row for path in results or () for row in read_published_rows(path, policy)]
    provenance: dict[str, Any] = {} if license is None else {"license": license}
    if dataset:
        before = config.provenance.get("datasets")
        provenance["datasets"] = list(dict.fromkeys([*(before if isinstance(before, list) else []), *dataset]))
    if dry_run:
        config = with_annotations(config, results=rows, provenance=provenance)
        _show(published_sizes(config), "would go to", repo_id)
        typer.echo(card_to_publish(directory, config, repo_id), nl=False)
        return
    if rows or provenance:
        config = annotate_artifact(directory, results=rows, provenance=provenance)
    keeps(
        context,
        f"{directory} is whole, and {repo_id} has all of the commit or nothing of it; run the same command again",
    )
    _show(published_sizes(config), "to", repo_id)
    options = {"private": private, "revision": revision, "create_pr": create_pr, "commit_message": commit_message}
    try:
        commit = push_artifact(directory, repo_id, **options)
    # The base class of the HTTP library's errors, whose name differs between versions of the Hub's client.
    except (HfHubHTTPError.__bases__[0], OSError) as error:
        typer.echo(f"error: the Hub did not take the artifact: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    typer.echo(commit.pr_url or commit.commit_url)


def _require_artifact(directory: Path, repo_id: str) -> None:
    if all((directory / name).is_file() for name in FILES):
        raise ConfigurationError(
            f"{directory} is no artifact, but what export custom-generate wrote, which goes to the Hub as it is: "
            f"hf upload {repo_id} {directory}"
        )


def _show(sizes: Mapping[str, int], preposition: str, repo_id: str) -> None:
    """List the uploads on standard error; standard output is the card's or the address's."""
    for name, size in sizes.items():
        typer.echo(f"{name}: {size:,} bytes", err=True)
    typer.echo(f"{counted(len(sizes), 'file')} and the model card {preposition} {repo_id}", err=True)
