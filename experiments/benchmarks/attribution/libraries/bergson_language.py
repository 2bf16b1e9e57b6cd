"""What bergson is told of an OPT or a GPT-2. Nothing of this repository is imported: see networks.py."""

# mypy: disable-error-code="import-not-found"
# bergson is installed elsewhere.

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def bergson_scores(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    damping: float | None,
    num_steps: int,
) -> Tensor:
    """Return the scores of bergson's EK-FAC, (N, M): positive ones are helpful; in units of the mean over tokens.

    bergson 2.5.1 runs on a CPU, but takes no OPT as it is, and no model by its conjugate gradients. Mended here:

    - its hooks want the inputs of a layer as (B, T, D), and end at OPT's feed-forward layers, which get (B·T, D)
      ("Expected input of shape [N, S, I]"): they get those of `networks.LanguageModel`;
    - without a GPU its conjugate gradients update a tensor over a memory map that is open for reading alone, and
      the process dies (segmentation fault at `x[n].add_` of astra.py): they get a copy.

    Args:
        model: a transformers OPT with the layers of `networks.LanguageModel`, or a GPT-2.
        train: tokens and the tokens that follow, (N, T) each.
        test: the same, (M, T).
        damping: added to the eigenvalues of each layer; None: its own, a tenth of their mean.
        num_steps: of conjugate gradients after EK-FAC, preconditioned by it, on all examples; 0: none.
    """
    import datasets
    import tokenizers
    import transformers
    from bergson import config
    from bergson.config.config import AstraConfig, HessianConfig, HessianPipelineConfig, InversionConfig
    from bergson.data import load_scores
    from bergson.hessians import astra
    from bergson.hessians.pipeline import hessian_pipeline

    refine = astra.Astra.refine

    def with_a_copy(self: Any, query: Any, start: dict[str, Tensor], row: int) -> Any:
        return refine(self, query, {name: own.clone() for name, own in start.items()}, row)

    one_longer = _one_longer(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained") as load,
        mock.patch.object(astra.Astra, "refine", with_a_copy),
    ):
        load.side_effect = lambda *_, **__: copy.deepcopy(one_longer)
        words = {str(token): token for token in range(int(one_longer.config.vocab_size))}  # type: ignore[union-attr,arg-type]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
        length = train[0].shape[1] + 1
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length).save_pretrained(
            folder
        )
        one_longer.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        for name, (tokens, following) in (("train", train), ("test", test)):
            rows = torch.cat([tokens, following[:, -1:]], dim=1).tolist()
            datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(Path(folder) / name)
        own = {"inversion": "absolute_damped_inverse", "damping_factor": damping} if damping is not None else {}
        hessian_pipeline(
            config.IndexConfig(
                run_path=f"{folder}/run",
                model=folder,
                data=config.DataConfig(dataset=f"{folder}/train"),
                token_batch_size=length,
                loss_reduction="mean",
                include_bias=True,
            ),
            HessianConfig(method="kfac", ev_correction=True),
            config.ScoreConfig(),
            config.PreprocessConfig(),
            HessianPipelineConfig(
                query=config.QuerySetConfig(dataset=f"{folder}/test", aggregation="none"),
                inversion_cfg=InversionConfig(**own),
                astra=AstraConfig(
                    num_steps=num_steps, solver="cg", batch_size=len(train[0]), micro_batch_size=len(train[0])
                ),
            ),
        )
        return torch.tensor(load_scores(Path(folder) / "run" / "scores")[:])


def _one_longer(model: nn.Module) -> nn.Module:
    """Return a copy that takes a token more, whose prediction no loss reads, and tells its layers how many."""
    model = copy.deepcopy(model)
    config: Any = model.config
    base: Any = model.base_model
    positions = base.decoder.embed_positions if config.model_type == "opt" else base.wpe
    positions.weight = nn.Parameter(
        torch.cat([positions.weight.data, torch.zeros_like(positions.weight.data[:1])])
    )
    config.max_position_embeddings += 1
    if config.model_type != "opt":
        return model

    def note_the_length(own: Any, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        tokens = arguments[0] if arguments else named["input_ids"]
        own.model.decoder.layers[0].fc1[0].length = tokens.shape[1]  # one module, in every layer

    model.register_forward_pre_hook(note_the_length, with_kwargs=True)
    return model
