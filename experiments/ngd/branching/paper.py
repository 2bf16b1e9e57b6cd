"""What the paper says about the settings of Figs. 4, 5 and 6, for their declarations."""

PAPER = {
    "model.hidden_sizes": [256, 256],
    "data._target_": "not stated",
    "seeds": "not stated",
    "before.training.num_epochs": "not stated",
    "after.training.num_epochs": "not stated",
    "before.optimizer.lr": 1e-4,
    "branches.*.lr": "not stated",
    "branches.*.alpha": "not stated for this figure",
    "branches.*.name": "SGD, NGD as in Eqs. 6 and 7; no code",
}
