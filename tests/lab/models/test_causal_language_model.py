"""Causal language models: small ones of every family, and published ones from a folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from curvlab.lab.models import build_model, pretrained_causal_language_model, small_causal_language_model

transformers = pytest.importorskip("transformers")
CONF = Path(__file__).parents[3] / "conf" / "model"
SMALL = {"num_layers": 1, "width": 8, "num_heads": 2}


def small(family: str, seed: int = 0, **settings) -> torch.nn.Module:
    factory = partial(small_causal_language_model, family=family, **(SMALL | settings))
    return build_model(factory, input_shape=(6,), num_outputs=300, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "mistral"])
def test_every_family_is_causal_reproducible_and_in_eval_mode(family: str) -> None:
    model = small(family)
    assert type(model).__name__.lower().startswith(family)
    assert not model.training
    tokens = torch.arange(6)[None] + 10
    changed = tokens.clone()
    changed[0, 4] = 99
    with torch.no_grad():
        logits, other = model(tokens).logits, model(changed).logits
    assert logits.shape == (1, 6, 300)
    torch.testing.assert_close(logits[:, :4], other[:, :4])  # what comes later is not seen
    assert not torch.allclose(logits[:, 4:], other[:, 4:])
    with torch.no_grad():
        torch.testing.assert_close(small(family)(tokens).logits, logits)
        assert not torch.allclose(small(family, seed=1)(tokens).logits, logits)


def test_the_config_builds_opt_with_tied_embeddings() -> None:
    factory = partial(hydra.utils.instantiate, OmegaConf.load(CONF / "opt.yaml"))
    model = build_model(factory, input_shape=(16,), num_outputs=512, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, transformers.OPTForCausalLM)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.config._attn_implementation == "eager"


def test_errors_say_what_to_change() -> None:
    build = partial(small_causal_language_model, num_outputs=300)
    with pytest.raises(ValueError, match=r"read token sequences \(T,\), got input_shape=\(1, 8, 8\)"):
        build(input_shape=(1, 8, 8), **SMALL)
    with pytest.raises(ValueError, match="multiple of num_heads, got 8 and 3"):
        build(input_shape=(6,), **(SMALL | {"num_heads": 3}))
    with pytest.raises(ValueError, match="unknown family 'bert'"):
        build(input_shape=(6,), family="bert", **SMALL)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    model = small("opt")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def test_published_weights_are_loaded_from_a_folder(saved) -> None:
    folder, model = saved
    config = OmegaConf.load(CONF / "opt_1b.yaml")
    assert config.name == "facebook/opt-1.3b"
    loaded = hydra.utils.instantiate(config, name=str(folder), input_shape=(6,), num_outputs=300)
    assert loaded.config._attn_implementation == "eager"
    tokens = torch.arange(6)[None] + 10
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits)
    double = pretrained_causal_language_model(name=str(folder), dtype="float64", input_shape=(6,), num_outputs=290)
    assert next(double.parameters()).dtype == torch.float64


def test_what_does_not_fit_a_published_model_is_refused(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    load = partial(pretrained_causal_language_model, name=str(folder))
    with pytest.raises(ValueError, match="has 6 positions: choose sequence_length=6 or less"):
        load(input_shape=(7,), num_outputs=300)
    with pytest.raises(ValueError, match="has 300 tokens, but the tokenizer 301"):
        load(input_shape=(6,), num_outputs=301)
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        load(input_shape=(6,), num_outputs=300, dtype="int8")
    with pytest.raises(FileNotFoundError, match=r"no model '.*nowhere': .*Check the name"):
        pretrained_causal_language_model(name=str(folder / "nowhere"), input_shape=(6,), num_outputs=300)
