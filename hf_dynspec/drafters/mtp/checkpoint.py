"""Reading multi-token-prediction layers from a target's checkpoint, where `from_pretrained` leaves them.

There are three layouts, by the names of tensors:

- `layers.{n + k}.*`, after the target's own `n` layers: DeepSeek-V3, GLM-4-MoE, Sarvam.
- `mtp.*`, in which the projection and the norms lie beside the layers: Qwen3-Next, Qwen3.5, Mellum.
- `model.mtp_layers.{k}.*`: MiMo.

Names and shapes are checked on the meta device, by the conversion that then loads the tensors.
"""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...artifacts.hub import is_folder, local_folder
from ...artifacts.tensors import open_safetensors, read_headers
from ...errors import ArtifactError, naming_source
from ...files import is_there
from ...modeling.parts import LARGEST_PADDING, decoder_of
from ..eagle.checkpoint_files import (
    CONFIG_FILE,
    FETCH_AGAIN,
    FLOATS,
    INDEX_FILE,
    WEIGHTS_FILE,
    read_weight_map,
    shards_of,
)
from .layers import MtpLayers

# Of a whole model: only headers are read of the tensors of other parts.
_MOST_TENSORS = 2**18
_MOST_BYTES = 2**43
_MOST_SHOWN = 8
# A tensor of each layer, and whether the layer's projection reads the hidden state before the embedding.
_LAYOUTS = (
    (re.compile(r"((?:.+\.)?layers\.)(\d+)\.eh_proj\.weight"), False),
    (re.compile(r"(mtp\.layers\.)(\d+)\.input_layernorm\.weight"), False),
    (re.compile(r"(model\.mtp_layers\.)(\d+)\.input_proj\.weight"), True),
)
_LOOKED_FOR = "layers.N.eh_proj (as DeepSeek-V3), mtp.layers.N (as Qwen3-Next), model.mtp_layers.N (as MiMo)"
# The parts of transformers' `MtpLayer` by their names in files. All others are those of its decoder layer.
_PARTS = {
    **dict.fromkeys(("enorm", "pre_fc_norm_embedding", "token_layernorm"), "enorm"),
    **dict.fromkeys(("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"), "hnorm"),
    **dict.fromkeys(("eh_proj", "fc", "input_proj"), "eh_proj"),
    **dict.fromkeys(("shared_head.norm", "norm", "final_layernorm"), "post_norm"),
}
# Matrices that a checkpoint may have in place of the target's, or copies of these.
_LENT = {"shared_head.head": "head", "lm_head": "head", "embed_tokens": "embedding"}


def read_layers(
    target: PreTrainedModel,
    lent: Mapping[str, torch.Tensor],
    path_or_repo: str | os.PathLike | None = None,
    **options: Any,
) -> tuple[MtpLayers, dict[str, torch.Tensor]]:
    """Read the layers that draft for a target, in the dtype and on the device of its output projection.

    Args:
        target: the target.
        lent: its `"head"` and `"embedding"`, `[V, d]`.
        path_or_repo: a folder or a repository (None: the one that the target was loaded from).
        options: `revision`, `cache_dir` and `token` of a repository.

    Returns:
        The layers, and the matrices of the checkpoint that replace lent ones.

    Raises:
        ArtifactError: there is no checkpoint, it has no such layers, or they are damaged, quantised, pickled, or of
            other shapes than the target's configuration says. Shapes and dtypes are checked before memory is taken.
        UnsupportedError: as `MtpLayers`.
    """
    source = path_or_repo or target.name_or_path
    if not source:
        fix = "Load it by from_pretrained, or say in path_or_repo where its checkpoint is."
        raise ArtifactError("target", "was not loaded from a checkpoint, which would hold its MTP layers", fix)
    with naming_source(source), ExitStack() as stack:
        files = _fetch(source, options)
        headers = read_headers(files, _MOST_TENSORS, _MOST_BYTES)
        held = {name: header for some in headers.values() for name, header in some.items()}
        names, count, hidden_first = _find(held, files[0].name)
        for name in names.values():
            if held[name].dtype not in FLOATS.values():
                problem = f"has the dtype {str(held[name].dtype).removeprefix('torch.')}, as in quantised checkpoints"
                raise ArtifactError(name, problem, "Say in path_or_repo where a checkpoint of 16 or 32 bits is.")
        layers = MtpLayers(target, count, hidden_first)
        opened = [stack.enter_context(open_safetensors(file)) for file in files]
        slices = {name: file.get_slice(name) for file in opened for name in file.keys()}
        replaced = _take_replaced(names, count, slices, lent)
        dtype, device = lent["head"].dtype, lent["head"].device
        layers.settle(torch.device("meta"), dtype)
        empty = {name: torch.empty(header.shape, device="meta") for name, header in held.items()}
        for tensors, place in ((empty, torch.device("meta")), (slices, device)):
            _convert(layers, names, tensors, decoder_of(target), place, dtype)
        for name, one in layers.named_parameters():
            if not bool(one.isfinite().all()):
                raise ArtifactError(names.get(name, name), "holds NaN or infinity", FETCH_AGAIN)
        return layers, {kind: slices[name][:].to(device, dtype) for kind, name in replaced.items()}


def _fetch(source: str | os.PathLike, options: Mapping[str, Any]) -> list[Path]:
    """A checkpoint's file of tensors; of several, those that hold MTP layers. All files are of one commit."""
    folder, names = local_folder(source, [CONFIG_FILE, INDEX_FILE], **options), {WEIGHTS_FILE}
    if is_there(folder / INDEX_FILE):
        places = read_weight_map(folder)
        names = {places[name] for name in _find(places, INDEX_FILE)[0].values()}
    if not is_folder(source):
        folder = local_folder(source, sorted(names), **{**options, "revision": folder.name})
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles and names == {WEIGHTS_FILE} and not is_there(folder / WEIGHTS_FILE):
        problem = f"is a pickle, and {folder} has no {WEIGHTS_FILE}"
        raise ArtifactError(pickles[0], problem, "Save the checkpoint as safetensors.")
    return shards_of(folder, names)


def _find(held: Collection[str], source: str) -> tuple[dict[str, str], int, bool]:
    """The tensors' names in a checkpoint by their names in `MtpLayers`, the number of layers, and whether their
    projections read the hidden state first."""
    for pattern, hidden_first in _LAYOUTS:
        found = [match for match in map(pattern.fullmatch, held) if match]
        if not found:
            continue
        stem, first = found[0][1], min(int(match[2]) for match in found)
        count = len({match[2] for match in found})
        names = {}
        for name in held:
            # Computed from the configuration, and yet in some files.
            if name.endswith(".inv_freq"):
                continue
            rest, layers = name, range(count)
            if name.startswith(stem):
                at, _, rest = name.removeprefix(stem).partition(".")
                layers = range(int(at) - first, int(at) - first + 1) if at.isdigit() else ()
            elif stem.startswith("mtp.") and name.startswith("mtp."):
                # Beside the layers, for all of them.
                rest = name.removeprefix("mtp.")
            else:
                continue
            part, _, last = rest.rpartition(".")
            part = _PARTS.get(part) or f"mtp_block.{part}"
            names |= {f"layers.{at}.{part}.{last}": name for at in layers if 0 <= at < count}
        return names, count, hidden_first
    problem = f"has no multi-token-prediction layers; looked for {_LOOKED_FOR}"
    raise ArtifactError(source, problem, "Say in path_or_repo where the target's full checkpoint is.")


def _take_replaced(
    names: dict[str, str], count: int, slices: Mapping[str, Any], lent: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Take all matrices in place of lent ones out of `names`. Returns the names of those that are no copies."""
    replaced = {}
    for part, kind in _LENT.items():
        given = [names.pop(f"layers.{at}.mtp_block.{part}.weight", None) for at in range(count)]
        for name in filter(None, given):
            if _are_copies(slices[name], lent[kind], name):
                continue
            if count > 1:
                problem = "is not the target's, and there are several layers"
                raise ArtifactError(name, problem, "Use a checkpoint whose layers share the target's.")
            replaced[kind] = name
    return replaced


def _are_copies(stored: Any, lent: torch.Tensor, name: str) -> bool:
    """Whether a matrix of a file, as a slice of safetensors, has the lent one's numbers in a sample of rows."""
    shape = tuple(stored.get_shape())
    if shape[1:] != tuple(lent.shape[1:]) or not 0 <= lent.shape[0] - shape[0] < LARGEST_PADDING:
        problem = f"has shape {list(shape)}, and the target's {list(lent.shape)}"
        raise ArtifactError(name, problem, "Use the checkpoint of this target.")
    rows = range(0, shape[0], max(1, shape[0] // 64))
    mine = torch.cat([stored[row : row + 1] for row in rows])
    return torch.equal(lent[list(rows)].cpu(), mine.to(lent.dtype))


def _convert(
    layers: MtpLayers,
    names: Mapping[str, str],
    tensors: Mapping[str, Any],
    decoder: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load tensors as transformers loads those of the target's decoder, whose experts it may stack."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping = get_model_conversion_mapping(decoder)
    config = LoadStateDictConfig(weight_mapping=mapping, device_map={"": device}, dtype=dtype)
    # It asks for a model's.
    layers.config, layers.base_model_prefix = layers.text_config, "model"
    before = logging.set_tqdm_hook(lambda make, given, options: make(*given, **{**options, "disable": True}))
    try:
        named = {name: tensors[given] for name, given in names.items()}
        found, _ = convert_and_load_state_dict_in_model(layers, named, config)
    finally:
        logging.set_tqdm_hook(before)
        del layers.config, layers.base_model_prefix
    problems = [f"parts of {name} are missing or of other shapes" for name in found.conversion_errors]
    problems += [f"missing {name}" for name in sorted(found.missing_keys - set(found.conversion_errors))]
    problems += [f"unexpected {names.get(name, name)}" for name in sorted(found.unexpected_keys)]
    for name, shape, expected in sorted(found.mismatched_keys):
        problems.append(f"{names.get(name, name)} has shape {list(shape)}, expected {list(expected)}")
    if problems:
        more = f" and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        problem = f"do not fit the target's configuration: {'; '.join(problems[:_MOST_SHOWN])}{more}"
        raise ArtifactError("MTP layers", problem, "Use the checkpoint of this target.")
