"""What users of Hugging Face bring: data sets, collators that pad, models of transformers and peft."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator, exact_traces
from curvlab.curvature.rows import dense_matrix
from curvlab.influence import influence, influence_scores, prepare_influence
from curvlab.linalg import identity
from curvlab.problem import mean_gradient, only_parameters
from curvlab.sampling import estimate_llc
from curvlab.solvers import ConjugateGradient, Ekfac, Rows
from curvlab.spectrum import top_eigenvalues
from tests.curvature.own_loss_cases import CASES, flat, own_gauss_newton, own_gradient, own_hessian
from tests.refusals import refuses

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

LOSS = nn.CrossEntropyLoss()
TEXTS = ["b c d e", "f", "c b", "e e f", "d c b f e", "b", "f d", "c c d"]
WORDS = ["<s>", "<pad>", "b", "c", "d", "e", "f"]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<s>")


def sentences(tokenizer, labels: list[int]):
    """As a user has them: texts of different lengths, classes in a column `label`, a column that is no input."""
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": labels, "idx": list(range(len(TEXTS)))})
    return rows.map(lambda row: tokenizer(row["text"], return_token_type_ids=False))


def whole_batch(tokenizer, rows) -> dict[str, Tensor]:
    """All of it at once, padded by hand."""
    lengths = [len(ids) for ids in rows["input_ids"]]
    ids = torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, found in zip(ids, rows["input_ids"], strict=True):
        row[: len(found)] = torch.tensor(list(found))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(list(rows["label"]))}


def own_example_gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(N, P), each from model(**batch).loss of the example alone."""
    count = len(batch["labels"])
    return torch.stack([own_gradient(model, {k: v[n : n + 1] for k, v in batch.items()}) for n in range(count)])


def test_from_a_data_set_to_influence_and_the_learning_coefficient(tokenizer) -> None:
    model = CASES["bert"].model()
    rows = sentences(tokenizer, [0, 1, 2, 0, 1, 2, 0, 1])

    # What a user writes.
    columns = rows.remove_columns(["text", "idx"])
    collate = transformers.DataCollatorWithPadding(tokenizer)
    train = DataLoader(columns.select(range(6)), batch_size=3, collate_fn=collate)
    test = DataLoader(columns.select(range(6, 8)), batch_size=3, collate_fn=collate)
    with only_parameters(model, "classifier.*", "*.pooler.*"):
        found = influence(model, LOSS, train, test, damping=1e-2, rtol=1e-8)
        llc = estimate_llc(
            model, LOSS, train, num_chains=2, num_draws=8, num_burnin_steps=4, step_size=1e-3, batch_size=4,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

        # The same by hand.
        batch = whole_batch(tokenizer, rows)
        own, others = ({k: v[part] for k, v in batch.items()} for part in (slice(0, 6), slice(6, 8)))
        damped = own_gauss_newton(model, own, 0) + 1e-2 * torch.eye(found.solution.x.shape[0]).double()
        expected = -own_example_gradients(model, others) @ torch.linalg.solve(
            damped, own_example_gradients(model, own).T
        )
        assert_close(found.scores, expected, rtol=1e-5, atol=1e-8)  # columns in the order of the data set
        pair = {k: v for k, v in own.items() if k != "labels"}, own["labels"]
        by_pair = estimate_llc(
            model, LOSS, pair, num_chains=2, num_draws=8, num_burnin_steps=4, step_size=1e-3, batch_size=4,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    assert llc.num_examples == 6
    assert llc.initial_loss == pytest.approx(float(model(**own).loss), rel=1e-9)
    assert_close(llc.per_chain, by_pair.per_chain, rtol=1e-6, atol=1e-9)


def test_a_data_set_without_a_collator(tokenizer) -> None:
    """Rows of one length, in torch format; columns that are no inputs are left out, as the Trainer does."""
    model = CASES["bert"].model()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 2, 0, 1, 2, 0, 1]})
    padded = rows.map(
        lambda row: tokenizer(row["text"], padding="max_length", max_length=5, return_token_type_ids=False)
    )
    with only_parameters(model, "classifier.*"):
        expected = own_hessian(model, whole_batch(tokenizer, sentences(tokenizer, list(rows["label"]))))
        op = HessianOperator(model, LOSS, padded.with_format("torch"), batch_size=3)
        assert_close(op.to_dense(), expected, rtol=1e-9, atol=1e-12)
        with pytest.raises(TypeError, match=r"with_format\('torch'\)"):
            HessianOperator(model, LOSS, padded.remove_columns("text")) @ torch.zeros(15).double()
        with pytest.raises(ValueError, match="a collator that pads"):
            HessianOperator(
                model, LOSS, sentences(tokenizer, list(rows["label"])).with_format("torch"), batch_size=3
            ) @ torch.zeros(15).double()


def test_what_a_tokenizer_returns(tokenizer) -> None:
    model = CASES["bert"].model()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    batch["labels"] = torch.arange(8) % 3
    with only_parameters(model, "classifier.*"):
        assert_close(mean_gradient(model, LOSS, batch), own_gradient(model, batch), rtol=1e-9, atol=1e-12)


def language_loader(tokenizer, collator, *, batch_size: int = 3) -> DataLoader:
    rows = datasets.Dataset.from_dict({"text": TEXTS}).map(
        lambda row: tokenizer(row["text"], return_token_type_ids=False), remove_columns="text"
    )
    return DataLoader(rows, batch_size=batch_size, collate_fn=collator)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_causal_models_with_the_collator_of_language_modelling(tokenizer, name: str) -> None:
    case = CASES[name]
    model = case.model()
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = language_loader(tokenizer, collate)
    (whole,) = language_loader(tokenizer, collate, batch_size=8)
    with only_parameters(model, *case.patterns):
        # Two texts of one word predict nothing: the mean is over the tokens of the others.
        assert_close(mean_gradient(model, LOSS, loader), own_gradient(model, whole), rtol=1e-7, atol=1e-10)
        op = GaussNewtonOperator(model, LOSS, loader)
        assert_close(op.to_dense(), own_gauss_newton(model, whole, 1), rtol=1e-9, atol=1e-12)
        drawn = FisherOperator(model, LOSS, loader, kind="monte_carlo", generator=torch.Generator().manual_seed(0))
        assert drawn.sample(4, torch.Generator().manual_seed(0)).shape == op.shape
        assert float(top_eigenvalues(op, 1, generator=torch.Generator().manual_seed(0)).values[0]) > 0


def with_linear_layers(model: nn.Module) -> tuple[nn.Module, Tensor]:
    """The same network with nn.Linear in the place of each Conv1D, and where its numbers stand in that one."""
    twin, places, start = copy.deepcopy(model), [], 0
    for name, module in list(twin.named_modules()):
        if isinstance(module, transformers.pytorch_utils.Conv1D):
            linear = nn.Linear(*module.weight.shape).to(module.weight)
            linear.weight.data, linear.bias.data = module.weight.data.T.clone(), module.bias.data
            linear.requires_grad_(module.weight.requires_grad)
            twin.set_submodule(name, linear)
    for name, parameter in twin.named_parameters():
        numbers = torch.arange(start, start + parameter.numel()).view(parameter.shape)
        changed = name.endswith("weight") and isinstance(
            model.get_submodule(name.rpartition(".")[0]), transformers.pytorch_utils.Conv1D
        )
        if parameter.requires_grad:
            places.append((numbers.T if changed else numbers).flatten())
            start += parameter.numel()
    return twin, torch.cat(places)


def test_layers_of_gpt2_are_linear_layers() -> None:
    """EK-FAC, alone, as preconditioner and in the parts of modules, against the network with nn.Linear."""
    model = CASES["gpt2"].model()
    tokens = torch.arange(15).reshape(3, 5) % 6
    data = tokens, tokens
    twin, places = with_linear_layers(model)
    damped, own = (GaussNewtonOperator(each, LOSS, data) + 0.1 * identity for each in (model, twin))
    inverse, expected = (Ekfac().build(op, generator=0)[0] for op in (damped, own))
    assert str(inverse) == "Kronecker factors of 4 layers"
    found, dense = inverse.to_dense(), expected.to_dense()[places][:, places]
    factored = (found != found.diagonal().diag()).any(1)
    assert int(factored.sum()) == 4 * 12 + 12 + 4 * 4 + 4 + 2 * 16 * 4 + 16 + 4
    assert_close(found[factored], dense[factored], rtol=1e-9, atol=1e-9)
    solver = ConjugateGradient(rtol=1e-7, preconditioner=Ekfac())
    scores = influence_scores(model, LOSS, data, data, damping=0.1, solver=solver)
    assert_close(scores, influence_scores(twin, LOSS, data, data, damping=0.1, rtol=1e-7), rtol=1e-5, atol=1e-7)
    parts, others = (
        prepare_influence(each, LOSS, data, damping=0.1, rtol=1e-7).by_module(data) for each in (model, twin)
    )
    for name, part in parts.items():
        assert_close(part, others[name], rtol=1e-5, atol=1e-7)
    assert_close(sum(parts.values()), scores, rtol=1e-5, atol=1e-7)


def test_rows_and_traces_of_gpt2_whose_layers_hold_all_parameters() -> None:
    config = CASES["gpt2"].model().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    model = transformers.GPT2ForSequenceClassification(config).double().eval()
    data = torch.arange(40).reshape(8, 5) % 5 + 1, torch.arange(8) % 3
    with only_parameters(model, "*.attn.*", "*.mlp.*", "score.*"):
        twin, places = with_linear_layers(model)
        op, own = (GaussNewtonOperator(each, LOSS, data) for each in (model, twin))
        dense = own.to_dense()[places][:, places]
        assert_close(op.to_dense(), dense, rtol=1e-9, atol=1e-12)
        assert_close(dense_matrix(op), dense, rtol=1e-9, atol=1e-12)
        assert float(exact_traces(op).mean()) == pytest.approx(float(dense.trace()), rel=1e-9)
        inverse, _ = Rows().build(op + 0.1 * identity)
        expected = torch.linalg.inv(dense + 0.1 * torch.eye(len(dense)).double())
        assert_close(inverse.to_dense(), expected, rtol=1e-8, atol=1e-8)


def test_masks_that_a_collator_draws_are_refused_and_drawn_once(tokenizer) -> None:
    tokenizer.add_special_tokens({"mask_token": "<s>"})
    model = CASES["bert masked"].model()
    torch.manual_seed(0)
    loader = language_loader(
        tokenizer, transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    )
    refuses("a collator that draws masks", GaussNewtonOperator, model, LOSS, loader)
    with only_parameters(model, *CASES["bert masked"].patterns):
        op = GaussNewtonOperator(model, LOSS, list(loader))
        assert torch.equal(op.to_dense(), op.to_dense())


def test_translation_with_the_collator_of_pairs(tokenizer) -> None:
    case = CASES["t5"]
    model = case.model()
    rows = datasets.Dataset.from_dict({"source": TEXTS, "target": TEXTS[::-1]}).map(
        lambda row: {
            **tokenizer(row["source"], return_token_type_ids=False),
            "labels": tokenizer(row["target"])["input_ids"],
        },
        remove_columns=["source", "target"],
    )
    for knows_model in (False, True):  # with the model, the collator makes decoder_input_ids itself
        collate = transformers.DataCollatorForSeq2Seq(tokenizer, model=model if knows_model else None)
        loader = DataLoader(rows, batch_size=3, collate_fn=collate)
        (whole,) = DataLoader(rows, batch_size=8, collate_fn=collate)
        assert ("decoder_input_ids" in whole) == knows_model
        with only_parameters(model, *case.patterns):
            found, expected = mean_gradient(model, LOSS, loader), own_gradient(model, whole)
            assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
            scores = influence_scores(model, LOSS, loader, whole, damping=0.1)
            assert scores.shape == (8, 8)


# --------------------------------------------------------------------------------------- peft
def adapted(name: str, task: str) -> nn.Module:
    """LoRA on attention, its B away from zero so that both factors have curvature."""
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "t5": ["q", "v"]}[name]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=1, lora_alpha=2, target_modules=targets, task_type=task, lora_dropout=0.1)
    model = peft.get_peft_model(CASES[name].model(), config).double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(("name", "task"), [("bert", "SEQ_CLS"), ("gpt2", "CAUSAL_LM"), ("t5", "SEQ_2_SEQ_LM")])
def test_adapters_of_peft(name: str, task: str) -> None:
    case = CASES[name]
    model = adapted(name, task)
    batch = case.draw(5, 3, 4)
    expected = own_gradient(model, batch)
    assert len(expected) < 120
    assert_close(
        mean_gradient(model, LOSS, [batch]), expected, rtol=0, atol=case.rtol * float(expected.abs().max())
    )
    for kind, dense in (
        (GaussNewtonOperator, own_gauss_newton(model, batch, case.shift)),
        (HessianOperator, own_hessian(model, batch)),
    ):
        vectors = torch.randn(len(dense), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found = kind(model, LOSS, [batch]) @ vectors
        assert_close(found, dense @ vectors, rtol=0, atol=10 * case.rtol * float(dense.abs().max()))
    with only_parameters(model, "*lora_A*") as size:
        op = GaussNewtonOperator(model, LOSS, [batch])
        assert op.shape == (size, size)
    places = flat(
        [torch.full_like(p, "lora_A" in n) for n, p in model.named_parameters() if p.requires_grad]
    ).bool()
    whole = own_gauss_newton(model, batch, case.shift)
    assert_close(op.to_dense(), whole[places][:, places], rtol=0, atol=10 * case.rtol * float(whole.abs().max()))
    scores = influence_scores(model, LOSS, [batch], [batch], damping=0.1)
    assert scores.shape == (3, 3)
    llc = estimate_llc(
        model, LOSS, [batch], num_chains=2, num_draws=4, num_burnin_steps=2, step_size=1e-4, batch_size=2,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert llc.initial_loss == pytest.approx(float(model(**batch).loss), rel=1e-6)
