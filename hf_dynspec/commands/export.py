"""`hf-dynspec export`: shortlists for other engines."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..build.exports import FILES
from ..errors import ConfigurationError, counted
from . import options
from .running import MODEL_FILES, CommandApp, claim_file, claim_folder

if TYPE_CHECKING:
    from ..build.exports.static import StaticShortlist

export_app = CommandApp(
    help="Write a static shortlist as other engines read it. What they cannot express is refused.",
    short_help="Write a static shortlist as other engines read it.",
)

Artifact = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="Folder or Hub id of a frequency artifact, or of another policy.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Tokens to take. Default: what the artifact says.")]
Static = Annotated[
    bool, typer.Option("--static", help="Of a policy that follows the text, take the static core that it has.")
]
Target = Annotated[
    str | None,
    typer.Option(help="Folder or Hub id of the target: refuse another tokenizer, and add the ids that end a text."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


@export_app.command(short_help="Write a token map, for SGLang and FR-Spec.")
def sglang(
    *,
    context: typer.Context,
    artifact: Artifact,
    out: Annotated[Path, typer.Option(metavar="FILE.pt", help="The token map to write.")],
    size: Size = None,
    static: Static = False,
    target: Target = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a token map: for SGLang's --speculative-token-map with an EAGLE-2 head, and for FR-Spec's own code.

    The file is read back as SGLang reads it before it takes its place.
    """
    _require_free([out], overwrite)
    claim_file(context, out, "--out", make_folder=True)
    from ..build.exports.sglang import write_token_map

    shortlist = _read(artifact, "SGLang", size, static, target)
    count = write_token_map(out, shortlist)
    typer.echo(f"{out}: {counted(count, 'token id')}, most frequent first, read back as SGLang does")
    typer.echo(f"give it to SGLang by --speculative-algorithm EAGLE --speculative-token-map {out}")


@export_app.command(short_help="Trim an EAGLE-3 head to a ranking, for vLLM.")
def vllm(
    *,
    context: typer.Context,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Folder or Hub id of an EAGLE-3 head.")],
    ranking: Annotated[str, typer.Option(metavar="ARTIFACT", help="Folder or Hub id of a frequency artifact.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target, whose rows the head gets.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    size: Size = None,
    static: Static = False,
    verifier: Annotated[
        str | None, typer.Option(help="Name or path of the target for vLLM. Default: --target, as it is given.")
    ] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to draft, unless the server is told otherwise.")
    ] = 5,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, as for bench: see that the written head drafts equally on them."),
    ] = None,
    allow_pickle: options.AllowPickle = False,
    overwrite: Overwrite = False,
) -> None:
    """Trim an EAGLE-3 head to the first tokens of a ranking, in the layout of speculators, which vLLM reads.

    The head is read back, bit for bit. --check loads the target in float32 and compares what the head drafts, from
    its own rows alone, with what the whole head drafts here from that shortlist.
    """
    _require_free([out / name for name in MODEL_FILES], overwrite)
    claim_folder(context, out, own=MODEL_FILES)
    import torch

    from ..build.exports.vllm import read_head, require_equal_drafts, trimmed_for_vllm, write_head
    from ..drafters.eagle.checkpoint import read_checkpoint
    from ..loading import load_model

    texts = None if check is None else _read_texts(check, target)
    checkpoint = read_head(head, allow_pickle=allow_pickle)
    shortlist = _read(ranking, "vLLM", size, static, target)
    trimmed = trimmed_for_vllm(checkpoint, shortlist, target, verifier=verifier, speculative_tokens=speculative_tokens)
    write_head(out, trimmed)
    count = trimmed.settings.draft_vocab_size
    typer.echo(f"{out}: an EAGLE-3 head of {counted(count, 'token')} for vLLM, read back bit for bit")
    if texts is not None:
        model = load_model(target, dtype=torch.float32, role="target")
        moved = [text.to(model.device) for text in texts]
        count = require_equal_drafts(checkpoint, read_checkpoint(out), shortlist.policy, model, moved)
        after = counted(len(texts), "text")
        typer.echo(f"{counted(count, 'token')}, drafted after {after}, are those of the whole head")
    settings = {"model": str(out), "method": "eagle3", "num_speculative_tokens": speculative_tokens}
    typer.echo(f"give it to vLLM by --speculative-config '{json.dumps(settings)}'")


@export_app.command("custom-generate", short_help="Write a folder for transformers alone.")
def custom_generate(
    *,
    context: typer.Context,
    artifact: Artifact,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write, to be uploaded to the Hub as it is.")],
    size: Size = None,
    static: Static = False,
    target: Target = None,
    repo_id: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="Where it will be published, for the usage on its card.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a folder with which transformers alone drafts from a shortlist, by generate(custom_generate=DIR)."""
    _require_free([out / name for name in FILES], overwrite)
    claim_folder(context, out, own=[Path(name).parts[0] for name in FILES])
    from ..build.exports.custom_generate import write_custom_generate

    shortlist = _read(artifact, "transformers", size, static, target)
    count = write_custom_generate(out, shortlist, repo_id)
    typer.echo(f"{out}: draft from {counted(count, 'token')} by generate(custom_generate={str(repo_id or out)!r}, …)")
    if repo_id is not None:
        typer.echo(f"upload it before by hf upload {repo_id} {out}")


def _read(artifact: str, engine: str, size: int | None, static: bool, target: str | None) -> "StaticShortlist":
    from ..build.exports.static import read_static_shortlist

    return read_static_shortlist(artifact, engine=engine, size=size, take_core=static, target=target)


def _require_free(paths: list[Path], overwrite: bool) -> None:
    taken = next((path for path in paths if path.exists()), None)
    if taken is not None and not overwrite:
        raise ConfigurationError(f"{taken} is there already; give --overwrite, or another --out")


def _read_texts(file: Path, target: str) -> list[Any]:
    """Token ids, int64 `[1, n]`, of prompts and of their first halves."""
    import torch

    from ..evaluation.prompts import encode_workload, read_workload
    from ..loading import load_tokenizer

    encoded = encode_workload(read_workload([file]), load_tokenizer(target), None)
    cut = [ids[:length] for ids in encoded for length in (len(ids) // 2, len(ids)) if length >= 2]
    return [torch.tensor([ids]) for ids in cut]
